"""One module for each op other than the four of packed arrays."""
