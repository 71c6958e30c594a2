"""Functional model definitions: parameters in, logits, images or a loss out."""

from . import autoencoder, blocks, config, decoder, fused_cross_entropy, hf
from .blocks import cross_entropy

__all__ = ["autoencoder", "blocks", "config", "cross_entropy", "decoder", "fused_cross_entropy", "hf"]
