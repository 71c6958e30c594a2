"""A decoder as a folder of compressed-tensors, which vLLM serves: int8, int4 or fp8 weights of the layers' linears.

    kind  format            tensors of a weight X                                     activations
    int8  int-quantized     X.weight i8[out, in], X.weight_scale [out, 1]             int8, a scale a token, at run time
    int4  pack-quantized    X.weight_packed i32[out, in / 8], X.weight_scale          as they are
                            [out, in / 128], X.weight_shape i64[2]
    fp8   float-quantized   X.weight e4m3[out, in], X.weight_scale [out, 1]           fp8, a scale a token, at run time

These are the schemes W8A8, W4A16 and FP8_DYNAMIC of https://github.com/vllm-project/compressed-tensors. The recipe is
its ``calculate_qparams`` and ``quantize`` for symmetric weights, in float32. A scale is the largest magnitude, divided
by 127.5, 7.5 or 448. Integers are rounded half to even, and clamped to -128 .. 127 or -8 .. 7. Scales are stored in the
dtype of the weight, and codes are made with the stored ones. The decoded weight is code · scale in that dtype.

Eight 4-bit codes share a word, the first in the lowest bits, each plus 8. Embeddings, norms and the head stay dense.
"""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

from fquant import tree
from fquant.device import HOST
from fquant.format import INT8
from fquant.lazy import Lazy
from fquant.packed import Packed
from fquant.tree import expect

from .. import hf
from ..config import Config
from ..hf.config import to_hf
from . import folder as folders
from .leaves import checked, is_linear, refuse_experts


@dataclasses.dataclass(frozen=True)
class Kind:
    """A scheme: its format, bits and type, the group that shares a scale (None: a row), and its type of activations."""

    format: str
    bits: int
    type: str
    group: int | None = None
    activations: bool = False


KINDS = {
    "int8": Kind("int-quantized", 8, "int", activations=True),
    "int4": Kind("pack-quantized", 4, "int", group=128),
    "fp8": Kind("float-quantized", 8, "float", activations=True),
}


def save(
    folder: str | Path,
    cfg: Config,
    params: Any,
    kind: str = "int8",
    max_shard_bytes: int = 5 << 30,
    extra: Mapping[str, Any] | None = None,
    resume: bool = False,
    done: folders.Done = lambda finished, total: None,
) -> None:
    """Write the decoder with its linears in ``kind``: int8, int4 (in groups of 128) or fp8.

    Leaves are tensors or Lazy, read and quantised one at a time. A linear may be a Packed in INT8 for int8, and keeps
    its codes. ``extra`` are further keys of ``config.json``; ``resume`` and ``done`` are those of ``folder.write``.
    Raises ValueError for another kind, a width that is no multiple of the group, and any other packed weight. Raises
    the errors of ``folder.write`` and ``leaves.checked``.
    """
    expect(kind in KINDS, f"kind = {kind!r}, want one of {', '.join(KINDS)}")
    folders.refuse_a_model(Path(folder), resume)
    refuse_experts(cfg, "compressed-tensors folders")
    dtype = str(checked(cfg, params)["embed"].like.dtype).removeprefix("torch.")
    keys = {"torch_dtype": dtype, "quantization_config": quantization_config(KINDS[kind])}
    config = to_hf(cfg) | dict(extra or {}) | keys
    folders.write(folder, tensors(cfg, params, kind), config, max_shard_bytes, resume, done)


def quantization_config(kind: Kind) -> dict[str, Any]:
    """Return the keys of compressed-tensors' QuantizationConfig that determine the scheme."""
    common = {"num_bits": kind.bits, "type": kind.type, "symmetric": True}
    strategy = {"strategy": "group", "group_size": kind.group} if kind.group else {"strategy": "channel"}
    activations = common | {"strategy": "token", "dynamic": True} if kind.activations else None
    weights = common | strategy | {"dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": kind.format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def quantize(w: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the codes [out, in], int8 or float8, of a weight, and its scales [out, groups] in the dtype of ``w``.

    Raises ValueError for a width that is no multiple of the group, and for NaN or infinity.
    """
    width, group = w.shape[-1], kind.group or w.shape[-1]
    expect(width % group == 0, f"width {width} is not a multiple of the {group} weights of a group; use int8 or fp8")
    expect(w.is_meta or w.isfinite().all(), "got a weight that is NaN or infinite; a quantised weight must be finite")
    x = rearrange(w.float(), "o (g e) -> o g e", e=group)
    largest = 448.0 if kind.type == "float" else 2 ** (kind.bits - 1) - 0.5
    scale = (x.abs().amax(-1) / largest).to(w.dtype)
    scale = torch.where(scale == 0, torch.finfo(w.dtype).eps, scale)
    codes = x / scale.float()[..., None]
    if kind.type == "float":
        return codes.clamp_(-448, 448).to(torch.float8_e4m3fn).flatten(1), scale
    top = 2 ** (kind.bits - 1)
    return codes.round_().clamp_(-top, top - 1).to(torch.int8).flatten(1), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode codes [out, in] with scales [out, groups]: f[out, in] in the dtype of the scales, rounded once."""
    group = codes.shape[1] // scale.shape[1]
    return codes.to(scale.dtype) * repeat(scale, "o g -> o (g e)", e=group)


def pack(codes: Tensor) -> Tensor:
    """Pack 4-bit codes i8[out, in] in -8 .. 7 as words i32[out, in / 8], the first in the lowest bits."""
    expect(codes.shape[1] % 8 == 0, f"width {codes.shape[1]} is not a multiple of the 8 codes of a word")
    halves = (codes + 8).view(torch.uint8).unflatten(1, (-1, 2))
    return (halves[..., 0] | halves[..., 1] << 4).contiguous().view(torch.int32)


def tensors(cfg: Config, params: Any, kind: str) -> dict[str, Lazy]:
    """Return the tensors of the folder by name."""
    leaves = checked(cfg, params)

    @lru_cache(maxsize=1)
    def parts(path: str) -> dict[str, Tensor]:
        return _tensors(path, hf.tensor_name(path, cfg), leaves[path].read(), KINDS[kind])

    out: dict[str, Lazy] = {}
    for path, leaf in leaves.items():
        if is_linear(path, leaf):
            for name, t in _tensors(path, hf.tensor_name(path, cfg), leaf.like, KINDS[kind]).items():
                out[name] = Lazy(lambda path=path, name=name: parts(path)[name], t.to("meta"))
        else:
            expect(not isinstance(leaf.like, Packed), f"{path}: got a Packed, want it dense; dequantize it first")
            out[hf.tensor_name(path, cfg)] = leaf
    return out


def _tensors(path: str, name: str, leaf: Tensor | Packed, kind: Kind) -> dict[str, Tensor]:
    """Return the tensors of the weight ``name`` at ``path``; meta tensors give meta tensors."""
    with tree.at(path):
        codes, scale = _codes(leaf, kind)
    if kind.format != "pack-quantized":
        return {name: codes, f"{name}_scale": scale}
    shape = torch.tensor(codes.shape, dtype=torch.int64, device=HOST)
    return {f"{name}_packed": pack(codes), f"{name}_scale": scale, f"{name}_shape": shape}


def _codes(leaf: Tensor | Packed, kind: Kind) -> tuple[Tensor, Tensor]:
    if isinstance(leaf, Tensor):
        return quantize(leaf, kind)
    fits = leaf.format == INT8 and kind.format == "int-quantized"
    expect(fits, f"got a Packed of {leaf.format}, which {kind.format} cannot keep; dequantize it first")
    assert isinstance(leaf.scale, Tensor)
    return leaf.codes, leaf.scale / 127
