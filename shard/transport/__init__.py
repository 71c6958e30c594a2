"""Transport between the ranks of one machine: shared memory, and gathers and scattered sums over gloo."""
