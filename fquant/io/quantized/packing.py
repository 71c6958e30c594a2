"""Bit fields of foreign files, as codes of a Packed.

Other libraries put the code of the lower index into the lower bits, of a byte or of an int32 word. A Packed has the
first of two 4-bit codes in the high half of a byte. Words are little-endian, so a tensor of words is viewed as bytes.

    words i32[..., n]  ->  fields u8[..., n·32/bits]  ->  codes u8[..., bytes]

Codes of 1 to 4 bits become 4-bit codes, and codes of 5 to 8 bits become bytes.
"""

import torch
from torch import Tensor

WORD = 32  # bits


def num_words(count: int, bits: int) -> int:
    """Return the number of words that hold ``count`` fields without gaps."""
    return -(-count * bits // WORD)


def fields(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first ``count`` fields of each row of i32[... n], u8[... count]; fields may straddle words."""
    if bits in (1, 2, 4, 8):
        packed = words.contiguous().view(torch.uint8)[..., None]
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        return ((packed >> shifts) & (2**bits - 1)).flatten(-2)[..., :count]
    pad = -words.shape[-1] % bits
    runs = torch.nn.functional.pad(words, (0, pad)).unflatten(-1, (-1, bits)).long() & 0xFFFFFFFF  # of 32 fields each
    out = torch.empty((*runs.shape[:-1], WORD), dtype=torch.uint8, device=words.device)
    for i in range(WORD):
        word, start = divmod(i * bits, WORD)
        value = runs[..., word] >> start
        if start + bits > WORD:
            value = value | runs[..., word + 1] << (WORD - start)
        out[..., i] = value & (2**bits - 1)
    return out.flatten(-2)[..., :count]


def gapped_fields(words: Tensor, bits: int, count: int) -> Tensor:
    """Return fields as :func:`fields`, of words that hold 32 // bits whole fields each and some unused high bits."""
    shifts = torch.arange(WORD // bits, dtype=torch.int32, device=words.device) * bits
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[..., :count].to(torch.uint8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes u8[... n] as those of a format of ``bits`` 4 or 8: two in a byte, the first in the high half."""
    if bits == 8:
        return codes.contiguous()
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[..., 0::2] << 4 | codes[..., 1::2]).contiguous()


def swap_nibbles(codes: Tensor) -> Tensor:
    """Exchange the halves of every byte, u8: the low half was first, and becomes the last."""
    return codes << 4 | codes >> 4


def words_to_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Return ``count`` fields of i32[... n] as the codes of a format of :func:`code_bits` bits."""
    if bits == 8:
        return words.contiguous().view(torch.uint8)[..., :count].contiguous()
    if bits == 4 and count % 2 == 0:  # bytes as they are, for a fifth of the time
        return swap_nibbles(words.contiguous().view(torch.uint8)[..., : count // 2])
    return pack(fields(words, bits, count), code_bits(bits))


def code_bits(bits: int) -> int:
    """Return the bits of the codes that hold fields of ``bits``: 4 or 8."""
    return 4 if bits <= 4 else 8
