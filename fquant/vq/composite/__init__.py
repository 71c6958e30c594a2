"""Quantisers made of quantisers: residuals, groups, hierarchies, and beam search over them."""
