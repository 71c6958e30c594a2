"""Transport between ranks: shared memory of one machine, gathers and sums over gloo, and the control plane."""
