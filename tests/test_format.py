"""fquant.format: tables against bitsandbytes, and what a format refuses to be."""

from dataclasses import replace

import bitsandbytes.functional as bnb
import pytest
import torch

from fquant import tree
from fquant.format import BLOCKS, DYNAMIC8, FORMATS, FP4, INT8, NF4, NF4_DQ, Format, num_blocks, num_bytes, parse

TABLES = {
    "nf4": (NF4, bnb.get_4bit_type("nf4", device="cpu")),
    "fp4": (FP4, bnb.get_4bit_type("fp4", device="cpu")),
    "dynamic8": (DYNAMIC8, bnb.create_dynamic_map(signed=True)),
}


@pytest.mark.parametrize("format, wanted", TABLES.values(), ids=TABLES)
def test_tables_are_those_of_bitsandbytes(format, wanted):
    assert torch.tensor(format.table).view(torch.int32).tolist() == wanted.float().view(torch.int32).tolist()


def test_a_format_is_a_value():
    assert replace(NF4, block=64) == NF4 and hash(replace(NF4, block=64)) == hash(NF4)
    assert len({*FORMATS.values(), NF4, replace(NF4, block=128), replace(NF4, flat=True)}) == len(FORMATS) + 2
    assert NF4_DQ.scale is DYNAMIC8 and replace(NF4_DQ, name="nf4", scale=None) == NF4
    assert tree.VALUES["fquant.Format"] is Format
    assert all(name == format.name == name.lower() for name, format in FORMATS.items())


REFUSED = {
    "bits": (dict(bits=5), r"mine: bits is 5; wanted 4 or 8"),
    "block": (dict(block=48), r"mine: block is 48; wanted one of 32, 64, 128, 256, 512, 1024, 2048, 4096"),
    "block of zero": (dict(block=0), r"mine: block is 0; wanted one of"),
    "4 bits without a block": (dict(block=None), r"mine: a 4-bit format needs a block; use one of 32"),
    "table too short": (dict(table=(0.0, 1.0)), r"mine: the table has 2 values; 4 bits need 16"),
    "table of other bits": (dict(bits=8), r"mine: the table has 16 values; 8 bits need 256"),
    "4 bits without a table": (dict(table=None), r"mine: codes without a table are int8, so bits is 8 and not 4"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_what_a_format_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        replace(NF4, name="mine", **change)


def test_parse():
    for name, format in FORMATS.items():
        assert parse(name) is format
        for block in BLOCKS:
            assert parse(name, block) == replace(format, block=block)
    with pytest.raises(ValueError, match="format 'nf5' is unknown; wanted one of nf4, nf4_dq, fp4, int8"):
        parse("nf5")
    with pytest.raises(ValueError, match="nf4: block is 100; wanted one of 32"):
        parse("nf4", 100)


COUNTS = [  # format, width, blocks, bytes
    (NF4, 64, 1, 32),
    (NF4, 65, 2, 33),
    (NF4, 1, 1, 1),
    (replace(NF4, block=32), 64, 2, 32),
    (FP4, 127, 2, 64),
    (DYNAMIC8, 300, 2, 300),
    (INT8, 300, 1, 300),
    (replace(INT8, block=64), 300, 5, 300),
]


@pytest.mark.parametrize("format, width, blocks, size", COUNTS, ids=lambda x: repr(x))
def test_counts(format, width, blocks, size):
    assert num_blocks(format, width) == blocks
    assert num_bytes(format, width) == size
