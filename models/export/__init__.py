"""Decoders as files of other tools: GGUF, and folders of bitsandbytes and of compressed-tensors."""

from . import gguf

__all__ = ["gguf"]
