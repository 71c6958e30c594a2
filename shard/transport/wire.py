"""Quantised messages: the matrices of a trained block in fewer bytes, for its all-gather.

    INT8      8 bits, a float32 scale for each 256 elements: the block's largest magnitude is 127
    FP8       8 bits (E4M3), a scale for each tensor: its largest magnitude is 448
    TERNARY   2 bits, a scale for each tensor: its mean magnitude, as in BitNet b1.58 (Ma et al. 2024)

The master weights stay with the ranks that have them; what is rounded are the weights of products. Vectors, such as
norms, travel in the dtype of products. FP8 all-gathers are those of torchao's float8 training; with a scale for each
tensor all ranks agree on its statistic first, which is one small collective for all tensors of a step (wire_scales).

A message of a rank is one run of bytes, as long as the longest of any rank:

    codes of its blocks of matrices  |  its blocks of vectors  |  scales of its blocks, of INT8  |  zeros

A block is 256 elements of one tensor, and a rank has whole blocks. So codes, scales and decoded values are the same
bits on any number of ranks. Statistics are exact too: a maximum is, and a mean is that of integers (``magnitudes``).

``encode`` and ``decode`` are single ops, so that passes move them with their gather. They have no derivatives.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fquant import tree

BLOCK = 256  # elements
ALIGN = 16  # bytes, of a message
LARGEST = {"int8": 127.0, "fp8": 448.0}
FRACTION = 2.0**32  # steps of a magnitude in one: sums of integers do not depend on their order
LEAST = 1e-5  # a mean magnitude, as in BitNet


@tree.value
@dataclass(frozen=True)
class Wire:
    """A format of messages: bytes of the codes of a block, and the statistic of a tensor that its scale needs."""

    name: str
    nbytes: int
    statistic: Literal["max", "mean"] | None  # None: each block has a scale


INT8, FP8, TERNARY = Wire("int8", BLOCK, None), Wire("fp8", BLOCK, "max"), Wire("ternary", BLOCK // 4, "mean")
WIRES = {wire.name: wire for wire in (INT8, FP8, TERNARY)}


@dataclass(frozen=True)
class Message:
    """The content of the messages of a block: blocks of each matrix, and their total with the vectors behind them."""

    wire: Wire
    dtype: torch.dtype  # of vectors, and of what is decoded
    matrices: tuple[int, ...]
    total: int
    rank: int
    ranks: int

    def parts(self, blocks: int, rank: int) -> tuple[int, int]:
        """Return the number of blocks of matrices and of vectors that ``rank`` sends, having ``blocks`` in all."""
        inside = lambda end: min(max(end - rank * blocks, 0), blocks)
        return inside(sum(self.matrices)), inside(self.total) - inside(sum(self.matrices))

    def nbytes(self, blocks: int) -> int:
        """Return the bytes of a message: those of the rank that needs the most."""
        code = self.wire.nbytes + 4 * (self.wire.statistic is None)
        sizes = (self.parts(blocks, rank) for rank in range(self.ranks))
        most = max(matrices * code + vectors * BLOCK * self.dtype.itemsize for matrices, vectors in sizes)
        return -(-most // ALIGN) * ALIGN


def encode(values: Tensor, scales: Tensor | None, message: Message) -> Tensor:
    """Return this rank's message u8[nbytes] of ``values`` f32[n]; ``scales`` f32[matrices] are of whole tensors."""
    return _Encode.apply(values, scales, message)


def decode(messages: Tensor, scales: Tensor | None, message: Message, n: int) -> Tensor:
    """Return the values [ranks·n] of all ranks' messages u8[ranks·nbytes], in the message's dtype; padding is zero."""
    return _decode(messages, scales, n // BLOCK, *_static(message))


def _static(it: Message) -> tuple[Any, ...]:
    return it.wire.name, it.dtype, list(it.matrices), it.total, it.rank, it.ranks


def _message(wire: str, dtype: torch.dtype, matrices: list[int], total: int, rank: int, ranks: int) -> Message:
    return Message(WIRES[wire], dtype, tuple(matrices), total, rank, ranks)


class _Encode(torch.autograd.Function):
    """The op, with a named error for what it cannot do."""

    @staticmethod
    def forward(values: Tensor, scales: Tensor | None, message: Message) -> Tensor:
        return _encode(values, scales, *_static(message))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, values: Tensor, scales: Any, message: Message) -> Any:
        fault = f"a bundle that travels as {message.wire.name} was mapped over"
        raise NotImplementedError(f"{fault}; use Precision(wire=None), or a loop over bundles")


def _encode_op(values: Tensor, scales: Tensor | None, *static: Any) -> Tensor:
    it, blocks = _message(*static), values.shape[0] // BLOCK
    matrices, vectors = it.parts(blocks, it.rank)
    grid = values.view(blocks, BLOCK)
    w, vector = grid[:matrices], grid[matrices : matrices + vectors].to(it.dtype)
    if scales is None:
        scale = w.abs().amax(1) / LARGEST[it.wire.name]
        own = [scale.contiguous()]
    else:
        scale, own = _per_block(scales, it)[it.rank * blocks :][:matrices], []
    codes = _codes(w / torch.where(scale > 0, scale, 1.0)[:, None], it.wire)
    sent = [t.reshape(-1).view(torch.uint8) for t in (codes, vector, *own)]
    return torch.cat([*sent, sent[0].new_zeros(it.nbytes(blocks) - sum(t.numel() for t in sent))])


def _decode_op(messages: Tensor, scales: Tensor | None, blocks: int, *static: Any) -> Tensor:
    it = _message(*static)
    rows, out = messages.view(it.ranks, -1), messages.new_zeros((it.ranks * blocks, BLOCK), dtype=it.dtype)
    known = None if scales is None else _per_block(scales, it)
    for rank, row in enumerate(rows):
        (matrices, vectors), first = it.parts(blocks, rank), rank * blocks
        ends = matrices * it.wire.nbytes, vectors * BLOCK * it.dtype.itemsize, 4 * matrices * (known is None)
        codes, vector, own, _ = row.split([*ends, row.shape[0] - sum(ends)])
        scale = own.view(torch.float32) if known is None else known[first:][:matrices]
        out[first:][:matrices] = _floats(codes.view(matrices, it.wire.nbytes), it.wire) * scale[:, None]
        out[first + matrices :][:vectors] = vector.view(it.dtype).view(vectors, BLOCK)
    return out.view(-1)


def _codes(x: Tensor, wire: Wire) -> Tensor:
    """Return the codes u8[blocks nbytes] of ``x`` f32[blocks 256], which has been divided by its scale."""
    if wire.name == "ternary":
        digits = x.round().clamp(-1, 1).add(1).to(torch.uint8).view(len(x), BLOCK // 4, 4)
        return digits[..., 0] | digits[..., 1] << 2 | digits[..., 2] << 4 | digits[..., 3] << 6
    x = x.clamp(-LARGEST[wire.name], LARGEST[wire.name])
    return (x.round().to(torch.int8) if wire.name == "int8" else x.to(torch.float8_e4m3fn)).view(torch.uint8)


def _floats(codes: Tensor, wire: Wire) -> Tensor:
    """Return the values f32[blocks 256] of codes u8[blocks nbytes], less their scale."""
    if wire.name == "ternary":
        digits = torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], -1)
        return digits.view(len(codes), BLOCK).to(torch.float32) - 1
    return codes.view(torch.int8 if wire.name == "int8" else torch.float8_e4m3fn).to(torch.float32)


def _per_block(scales: Tensor, it: Message) -> Tensor:
    """Return the scale of each block of matrices, f32[blocks]."""
    return torch.cat([scale.expand(count) for scale, count in zip(scales, it.matrices, strict=True)])


def magnitudes(values: Tensor, message: Message) -> Tensor:
    """Return this rank's part of the statistic of each matrix, to be combined over ranks.

    For "max" that is the largest magnitude of this rank's ``values`` f32[n], or 0: f32[matrices]. For "mean" it is the
    sum of magnitudes in steps of 2^-32, which must be less than 2^31: i64[matrices].
    """
    blocks = values.shape[0] // BLOCK
    grid, first, at, found = values.view(blocks, BLOCK).abs(), message.rank * blocks, 0, list[Tensor]()
    is_max = message.wire.statistic == "max"
    each = grid.amax(1) if is_max else (grid.sum(1).double() * FRACTION).round().long()
    for count in message.matrices:
        low, high = (min(max(end - first, 0), blocks) for end in (at, at + count))
        part = each[low:high]
        empty = part.new_zeros(())
        found.append(empty if low == high else part.amax() if is_max else part.sum())
        at += count
    return torch.stack(found) if found else each.new_zeros(0)


def scales_of(statistics: Tensor, message: Message, numbers: list[int]) -> Tensor:
    """Return the scales f32[matrices] of the statistics of all ranks; ``numbers`` are the elements of each matrix."""
    if message.wire.statistic == "max":
        return statistics / LARGEST[message.wire.name]
    sums = zip(
        statistics.double().unbind(), numbers, strict=True
    )  # numbers, because a constant tensor is none of a step
    return torch.stack([total / (FRACTION * number) for total, number in sums]).float().clamp(min=LEAST)


_STATIC = "str wire, ScalarType dtype, int[] matrices, int total, int rank, int ranks"
_fake_encode = lambda x, scales, *static: x.new_empty(_message(*static).nbytes(x.shape[0] // BLOCK), dtype=torch.uint8)
_fake_decode = lambda x, scales, blocks, *static: x.new_empty(
    _message(*static).ranks * blocks * BLOCK, dtype=_message(*static).dtype
)
_LIBRARY = torch.library.Library("fquant", "FRAGMENT")
for _name, _signature, _compute, _fake in (
    ("encode_message", f"(Tensor x, Tensor? scales, {_STATIC}) -> Tensor", _encode_op, _fake_encode),
    ("decode_messages", f"(Tensor x, Tensor? scales, int blocks, {_STATIC}) -> Tensor", _decode_op, _fake_decode),
):
    _LIBRARY.define(_name + _signature, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _compute, _key)
    torch.library.register_fake(f"fquant::{_name}", _fake, lib=_LIBRARY)
_encode, _decode = torch.ops.fquant.encode_message.default, torch.ops.fquant.decode_messages.default
