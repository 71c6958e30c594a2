"""Functional model definitions: parameters in, logits, images or a loss out."""

from . import autoencoder, blocks, config, decoder, encoder, fused_cross_entropy, generate, hf, hf_encoder
from .blocks import cross_entropy

__all__ = [
    "autoencoder", "blocks", "config", "cross_entropy", "decoder", "encoder", "fused_cross_entropy", "generate", "hf",
    "hf_encoder",
]  # fmt: skip
