"""The recipes of ``fquant.quantize``: rows of floats in, the codes, scales and zero points of a format out."""
