"""Train a VQ-VAE on patches of photographs: ``python -m examples.vqvae``."""
