"""Tests of fquant.io.quantized.packing against integers of Python."""

import pytest
import torch

from fquant.io.quantized import packing
from tests.helpers.quantized_tensors import integers, words


@pytest.mark.parametrize("count", [1, 31, 32, 96, 100])
@pytest.mark.parametrize("bits", range(1, 9))
def test_fields_without_gaps(bits, count):
    wanted = integers(0, 2**bits, 3, count)
    packed = words(wanted, bits, 1)
    assert packed.shape[1] == packing.num_words(count, bits)
    assert packing.fields(packed, bits, count).equal(wanted.to(torch.uint8))
    codes = packing.words_to_codes(packed, bits, count)
    held = packing.code_bits(bits)
    assert codes.is_contiguous() and codes.shape[1] == -(-count * held // 8)
    assert codes.equal(packing.pack(wanted.to(torch.uint8), held))


@pytest.mark.parametrize("bits", range(1, 9))
def test_fields_with_gaps(bits):
    each, wanted = 32 // bits, integers(0, 2**bits, 3, 50)
    rows = [[sum(f << bits * i for i, f in enumerate(row[at : at + each])) for at in range(0, 50, each)]
            for row in wanted.tolist()]  # fmt: skip
    packed = torch.tensor(rows, dtype=torch.int64).to(torch.int32)
    assert packing.gapped_fields(packed, bits, 50).equal(wanted.to(torch.uint8))


def test_the_first_code_is_in_the_high_half():
    codes = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    assert packing.pack(codes, 4).tolist() == [[0x12, 0x30]] and packing.pack(codes, 8).equal(codes)
    assert packing.swap_nibbles(torch.tensor([0x12], dtype=torch.uint8)).tolist() == [0x21]
