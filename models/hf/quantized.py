"""The quantised weights of a Hugging Face folder as Lazy leaves, each of which reads one Packed.

The names of the tensors decide which weights are quantised; ``fquant.io.quantized`` knows the layouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fquant import tree
from fquant.device import HOST
from fquant.io import quantized, safetensors
from fquant.lazy import Lazy
from fquant.packed import Packed

from .folder import read_method

EMBED = "model.embed_tokens.weight"  # has the model's dtype, where the config does not say it


@dataclass(frozen=True)
class Quantized:
    """A folder whose weights are quantised: the method, the model's dtype, the header of each tensor.

    Weights are read to ``device``, where their bytes are rearranged.
    """

    method: quantized.Method
    dtype: torch.dtype
    headers: Mapping[str, safetensors.Header]
    entries: Mapping[str, safetensors.Entry]
    device: torch.device

    @classmethod
    def of(
        cls, folder: Path, headers: Mapping[str, safetensors.Header], device: torch.device = HOST
    ) -> "Quantized | None":
        """Return what a folder's config says of its weights; None if they are not quantised."""
        if (found := read_method(folder)) is None:
            return None
        method, dtype = found
        entries = {name: header.tensors[name] for name, header in headers.items()}
        if dtype is None:
            dtype = entries[EMBED].dtype if EMBED in entries else torch.float32
        return cls(method, dtype, headers, entries, device)

    def names(self, weight: str) -> tuple[str, ...]:
        """Return the names of the tensors that make up ``weight``; () if it is dense."""
        return quantized.names(self.method, weight, self.entries)

    def is_zero_bias(self, name: str) -> bool:
        """Return True for a bias of zeros beside a quantised weight: older AutoGPTQ gave one to every linear."""
        weight = name.removesuffix("bias") + "weight"
        if not name.endswith(".bias") or not self.names(weight) or len(self.entries[name].shape) != 1:
            return False
        return not safetensors.read(self.headers[name], name).any()

    def leaf(self, weight: str, shape: tuple[int, ...]) -> Lazy:
        """Return a Lazy that reads ``weight``; raise ValueError if its tensors do not fit."""
        parts = self.names(weight)
        path = self.headers[parts[0]].path
        dtype = quantized.dtype(self.method, weight, self.entries, self.dtype)
        with tree.at(str(path)):
            like = quantized.like(self.method, weight, self.entries, shape, dtype)

        def read() -> Packed:
            tensors = {name: safetensors.read(self.headers[name], name, device=self.device) for name in parts}
            with tree.at(str(path)):
                return quantized.load(self.method, weight, tensors, shape, dtype)

        stamp = lambda: " ".join(safetensors.stamp(self.headers[name], name) for name in parts)
        return Lazy(read, like, stamp, device=self.device)
