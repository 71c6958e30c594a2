"""Code that several programs share: the training step and its price, data, runs, progress, launching."""
