"""Decoders as files of other tools: GGUF, and folders of bitsandbytes and of compressed-tensors."""

from . import bitsandbytes, compressed_tensors, folder, gguf

__all__ = ["bitsandbytes", "compressed_tensors", "folder", "gguf"]
