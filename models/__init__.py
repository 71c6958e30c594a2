"""Functional model definitions: parameters in, logits out."""

from . import blocks, config, decoder, hf
from .blocks import cross_entropy

__all__ = ["blocks", "config", "cross_entropy", "decoder", "hf"]
