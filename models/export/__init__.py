"""Decoders as files of other tools: GGUF, plain folders, and folders of bitsandbytes and of compressed-tensors."""

from . import bitsandbytes, compressed_tensors, dense, folder, gguf

__all__ = ["bitsandbytes", "compressed_tensors", "dense", "folder", "gguf"]
