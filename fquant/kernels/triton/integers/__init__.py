# ruff: noqa: F401  (a face)
"""Products of integers in Triton: rows of x are quantised in a kernel, and multiplied with codes in another."""

from .products import integer_matmul, integer_mm
