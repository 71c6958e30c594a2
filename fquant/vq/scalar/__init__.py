"""Quantisers without a codebook: each scalar of a row takes one of a few levels."""
