"""Vector quantisation: codebooks and scalar quantisers as states, and pure functions over them."""

from .quantized import Mean, Quantized, mean

__all__ = ["Mean", "Quantized", "mean"]
