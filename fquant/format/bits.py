"""Codes of 2, 3 and 4 bits as streams of bits: the first code is in the highest bits of the first byte of a row."""

import torch.nn.functional as F
from torch import Tensor


def pack(index: Tensor, bits: int) -> Tensor:
    """Return codes u8[... width], one a byte, as u8[... width·bits/8]; rows are padded with zeros to whole bytes."""
    if bits == 8:
        return index
    width = index.shape[-1]
    count = 8 if bits == 3 else 8 // bits  # codes that fill whole bytes
    parts = F.pad(index, (0, -width % count)).unflatten(-1, (-1, count)).unbind(-1)
    if bits == 3:
        word = sum(part.int() << (21 - 3 * i) for i, part in enumerate(parts))  # 24 bits
        assert isinstance(word, Tensor)
        whole = (word[..., None] >> word.new_tensor([16, 8, 0])).flatten(-2)
        return (whole & 255)[..., : -(-width * 3 // 8)].to(index.dtype)
    out = parts[0] << (8 - bits)
    for i, part in enumerate(parts[1:], 2):
        out = out | part << (8 - bits * i)
    return out


def unpack(codes: Tensor, bits: int, width: int) -> Tensor:
    """Return the ``width`` codes u8[... width] of rows u8[... width·bits/8], one a byte."""
    if bits == 8:
        return codes
    if bits == 3:
        a, b, c = F.pad(codes, (0, -codes.shape[-1] % 3)).int().unflatten(-1, (-1, 3)).unbind(-1)
        word = a << 16 | b << 8 | c
        index = word[..., None] >> word.new_tensor(range(21, -1, -3)) & 7
    else:
        index = codes[..., None] >> codes.new_tensor(range(8 - bits, -1, -bits)) & (1 << bits) - 1
    return index.flatten(-2)[..., :width].to(codes.dtype)
