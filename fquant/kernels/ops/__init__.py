"""One module for each op that is not a product of packed arrays."""
