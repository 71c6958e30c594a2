"""Functional model definitions: parameters in, logits or a loss out."""

from . import blocks, config, decoder, head, hf
from .blocks import cross_entropy

__all__ = ["blocks", "config", "cross_entropy", "decoder", "head", "hf"]
