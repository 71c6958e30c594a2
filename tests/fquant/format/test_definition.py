"""Tests of fquant.format: tables against bitsandbytes, texts, and invalid formats."""

import math
from dataclasses import replace

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32

from fquant import dequantize, quantize, random, tree
from fquant.format import (
    AF4,
    AQ_2X8,
    AQ_3X8,
    BLOCKS,
    DYNAMIC8,
    E4M3,
    FORMATS,
    FP4,
    FP8,
    INT4,
    INT4_ZERO,
    INT8,
    MXFP4,
    NF4,
    NF4_DQ,
    Format,
    Vectors,
    num_blocks,
    num_bytes,
    parse,
    read,
)
from fquant.quantized_training.weights import stochastic_quantize
from tests.helpers.formats import KINDS, alike

TABLES = {
    "nf4": (NF4, bnb.get_4bit_type("nf4", device="cpu")),
    "fp4": (FP4, bnb.get_4bit_type("fp4", device="cpu")),
    "af4": (AF4, bnb.get_4bit_type("af4", device="cpu").flip(0)),
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
    "bits": (dict(bits=5), r"mine: bits is 5; wanted one of 2, 3, 4, 8"),
    "block": (dict(block=48), r"mine: block is 48; wanted one of 16, 32, 64, 128, 256, 512, 1024, 2048, 4096"),
    "block of zero": (dict(block=0), r"mine: block is 0; wanted one of"),
    "table too short": (dict(table=(0.0, 1.0)), r"mine: the table has 2 values; 4 bits need 16"),
    "table of other bits": (dict(bits=8), r"mine: the table has 16 values; 8 bits need 256"),
    "4 bits without a table": (dict(table=None), r"mine: codes without a table are int8, so bits is 8 and not 4"),
    "zero of a flat format": (dict(zero=True, flat=True), "mine: a zero point does not combine with flat; leave one"),
    "zero and a mean": (dict(zero=True, center=True), "mine: a zero point does not combine with center; leave one out"),
    "zero of integers": (dict(bits=8, table=None, zero=True), "mine: zero needs a table; use the integers"),
    "zero of vectors": (
        dict(bits=8, block=None, table=None, vectors=Vectors(8, 2), zero=True),
        "mine: zero needs a table",
    ),
    "zero of another kind": (dict(zero=1), "mine: zero is 1; wanted True or False"),
    "center of another kind": (dict(center="no"), "mine: center is 'no'; wanted True or False"),
    "shared of another kind": (dict(shared="yes"), "mine: shared is 'yes'; wanted True or False"),
    "mean without a table": (dict(bits=8, table=None, mean=True), "mine: mean needs a table; give one"),
    "mean and zero": (dict(mean=True, zero=True), "mine: a zero point does not combine with mean; leave one out"),
    "mean and unit": (dict(mean=True, unit=2.0), "mine: a unit needs a table, and does not combine with mean"),
    "power and unit": (dict(power=True, unit=2.0), "mine: power does not combine with mean or unit; leave it out"),
    "unit beyond float32": (dict(unit=10**400), "mine: unit is .*; wanted a finite number above 0, in float32"),
    "table beyond float32": (
        dict(table=(-(10**400), *(NF4.table or ())[1:])),
        r"mine: the table has .*, which is infinite in",
    ),
    "infinities alone": (dict(table=(-math.inf,) * 16), "mine: the table has no number"),
    "unit of 0": (dict(unit=0.0), "mine: unit is 0.0; wanted a finite number above 0"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_what_a_format_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        replace(NF4, name="mine", **change)


OF_OTHER_TYPES = {
    "tensor": (dict(table=torch.tensor(NF4.table)), "mine: table: got Tensor, wanted a tuple of numbers, .*tolist"),
    "array": (dict(table=np.array(NF4.table)), "mine: table: got ndarray, wanted a tuple of numbers"),
    "text": (dict(table="0123456789abcdef"), "mine: table: got str, wanted a tuple of numbers"),
    "texts": (dict(table=("a",) * 16), "mine: table: got 'a' among its values, wanted numbers"),
    "bits": (dict(bits=4.0), "mine: bits is 4.0; wanted an int"),
    "bool": (dict(bits=True), "mine: bits is True; wanted an int"),
    "block": (dict(block="64"), "mine: block is '64'; wanted an int, or None"),
    "scale": (dict(scale=torch.float32), "mine: scale: got torch.float32, wanted a Format, or None for float32"),
    "vectors": (dict(vectors=(8, 2)), r"mine: vectors: got \(8, 2\), wanted a Vectors, or None"),
    "unit": (dict(unit="7"), "mine: unit is '7'; wanted a number above 0, or None"),
    "name": (dict(name=3), "name: got 3; wanted lower-case letters"),
}


@pytest.mark.parametrize("change, message", OF_OTHER_TYPES.values(), ids=OF_OTHER_TYPES)
def test_fields_of_other_types(change, message):
    with pytest.raises(TypeError, match=message):
        replace(NF4, **{"name": "mine"} | change)


@pytest.mark.parametrize("name", ["", "A", "a:64", "{}"])
def test_names_that_a_text_cannot_hold(name):
    with pytest.raises(ValueError, match="name: got .*; wanted lower-case letters"):
        replace(NF4, name=name)
    with pytest.raises(ValueError, match="mine: the table has no number"):
        replace(NF4, name="mine", table=(math.nan,) * 16)


def test_numbers_of_numpy_are_numbers():
    table = tuple(np.array(NF4.table))
    format = replace(NF4, name="mine", bits=np.int64(4), block=np.int32(64), table=table, unit=np.float32(1))
    assert format == replace(NF4, name="mine", unit=1.0) and read(format.text) == format
    assert Vectors(np.int64(8), np.uint8(2)) == Vectors(8, 2) and parse("nf4", np.int64(128)) == replace(NF4, block=128)


TOPS = {  # a table, and its default unit
    "1 and -1": (NF4.table, 1.0),
    "1 alone": ((-0.5, *sorted((NF4.table or ())[1:])), 1.0),
    "-1 alone": ((-1.0, *(i / 16 for i in range(-7, 8))), 1.0),
    "2 bits": ((-1.0, -0.5, 0.0, 0.5), 0.5),
    "other numbers": ((*range(-8, 8),), 7.0),
}


@pytest.mark.parametrize("table, unit", TOPS.values(), ids=TOPS)
def test_the_default_unit(table, unit):
    """As documented, in any order, and with codes that are no number, which no weight gets."""
    x = torch.linspace(-1, 1, 60)[None].repeat(2, 1)
    bits = len(table).bit_length() - 1
    for lost in [None, *range(len(table))] if unit == 1.0 else [None]:
        values = table if lost is None else (*table[:lost], math.nan, *table[lost + 1 :])
        if lost is not None and abs(table[lost]) == 1.0 and table is not NF4.table:
            continue
        for shuffled in (values, values[::-1]):
            format = Format("mine", bits, 64, shuffled)
            packed = quantize(x, format)
            assert packed.scale.allclose(torch.full_like(packed.scale, 1 / unit))
            points = torch.tensor([v for v in values if v == v]) / unit
            nearest = (x[..., None] - points).abs().amin(-1)
            assert torch.allclose((dequantize(packed) - x).abs(), nearest, atol=1e-6)


@pytest.mark.parametrize("bits, zero", [(4, False), (4, True), (8, False), (8, True)])
def test_a_code_without_a_value_next_to_integers_moves_no_other(bits, zero):
    x = random.normal(random.key(0), (5, 64))
    values = range(2**bits - 1) if zero else range(1 - 2 ** (bits - 1), 2 ** (bits - 1))
    for table in ((math.nan, *values), (*values, math.nan)):
        format = Format("mine", bits, 64, table, zero=zero)
        for packed, most in ((quantize(x, format), 0.501), (stochastic_quantize(x, format, random.key(1)), 1.001)):
            assert isinstance(packed.scale, torch.Tensor)
            assert ((dequantize(packed) - x).abs() <= most * packed.scale).all()


def test_the_default_unit_is_the_largest_value_with_both_signs():
    x = torch.linspace(-1, 1, 64)[None]
    assert quantize(x, replace(INT4, name="mine", unit=7.0)).scale.equal(quantize(x, INT4).scale)
    assert quantize(x, INT4).scale.item() == torch.tensor(1 / 7).item()


def test_parse():
    for name, format in FORMATS.items():
        assert parse(name) is format
        for block in BLOCKS:
            assert parse(name, block) == replace(format, block=block)
    with pytest.raises(ValueError, match="format 'nf5' is unknown; wanted one of nf4, nf4_dq, fp4, af4"):
        parse("nf5")
    with pytest.raises(ValueError, match="nf4: block is 100; wanted one of 16"):
        parse("nf4", 100)


def test_tables_of_bits_are_those_of_their_libraries():
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert alike(torch.tensor(FP8.table), e4m3) and E4M3[0x7F] != E4M3[0x7F]
    assert alike(torch.tensor(MXFP4.table), f4_unpacked_to_f32(torch.arange(16, dtype=torch.uint8)))
    assert INT4.table == tuple(range(-8, 8)) and INT4_ZERO.table == tuple(range(16)) and INT4_ZERO.zero


def test_text_of_formats_without_zero_points_is_that_of_older_files():
    for format in FORMATS.values():
        text = replace(format, name="mine").text
        assert ('"zero":true' in text) == format.zero and '"zero":false' not in text and read(text).text == text
        assert read(text) == replace(format, name="mine"), "codes that are no number are equal, too"


TEXTS = {
    "nf4": NF4,
    "int4": INT4,
    "int4_zero:32": replace(INT4_ZERO, block=32),
    "mxfp4:16": replace(MXFP4, block=16),
    "fp8": FP8,
    "nf4_dq": NF4_DQ,
    "fp4": FP4,
    "int8": INT8,
    "dynamic8": DYNAMIC8,
    "nf4:128": replace(NF4, block=128),
    "nf4_dq:4096": replace(NF4_DQ, block=4096),
    "int8:32": replace(INT8, block=32),
}


@pytest.mark.parametrize("text, format", TEXTS.items(), ids=TEXTS)
def test_text_of_a_known_format(text, format):
    assert format.text == text and read(text) == format


LONG = {format.name: format for format in KINDS if format.text.startswith("{")} | {
    "no block": replace(DYNAMIC8, block=None),  # as text, a block cannot be none
    "4 bits without a block": replace(INT4_ZERO, block=None),
    "thirds": replace(NF4, name="thirds", table=tuple(i / 3 for i in range(-8, 8))),
    "other name": replace(NF4, name="mine"),
    "same name": replace(FP4, name="nf4"),
}  # fmt: skip


@pytest.mark.parametrize("format", LONG.values(), ids=LONG)
def test_text_of_any_other_format_is_all_of_it(format):
    assert format.text.startswith("{") and read(format.text) == format
    assert read(format.text) is read(format.text), "read once"


def test_texts_tell_formats_apart():
    every = {*KINDS, *TEXTS.values(), *LONG.values(), *(replace(NF4, block=block) for block in BLOCKS)}
    assert len({format.text for format in every}) == len(every)


def test_plain_keeps_scales_in_float32():
    assert NF4.plain is NF4 and NF4_DQ.plain == replace(NF4_DQ, scale=None) and NF4_DQ.plain.plain is NF4_DQ.plain
    nested = replace(DYNAMIC8, scale=INT8)
    assert replace(NF4, scale=nested).plain == NF4 and nested.plain == DYNAMIC8


@pytest.mark.parametrize("former, format", [("vq2", AQ_2X8), ("vq3", AQ_3X8)], ids=str)
def test_former_names(former, format):
    """Files and command lines of earlier releases hold these names."""
    assert parse(former) is read(former) is format and parse(former, 64) == read(f"{former}:64")
    assert replace(format, name=former) == format
    text = replace(format, vectors=replace(format.vectors, dim=4)).text
    assert read(text.replace(format.name, former)).text == text


UNKNOWN = [
    "",
    "nf5",
    "NF4",
    "nf4 ",
    "nf4:",
    "nf4:x",
    "nf4:-64",
    "nf4:64:64",
    "{}",
    '{"name":"nf4"}',
    "{",
    "[1]",
    "nf4:1e2",
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_text_of_no_format(text):
    with pytest.raises(ValueError, match="format .* is unknown; wanted the text of a Format"):
        read(text)


def test_text_of_an_impossible_format():
    with pytest.raises(ValueError, match="nf4: block is 48; wanted one of 16"):
        read("nf4:48")
    with pytest.raises(ValueError, match="mine: bits is 5; wanted one of 2, 3, 4, 8"):
        read(replace(NF4, name="mine").text.replace('"bits":4', '"bits":5'))


COUNTS = [  # format, width, blocks, bytes
    (NF4, 64, 1, 32),
    (NF4, 65, 2, 33),
    (NF4, 1, 1, 1),
    (replace(NF4, block=32), 64, 2, 32),
    (FP4, 127, 2, 64),
    (DYNAMIC8, 300, 2, 300),
    (INT8, 300, 1, 300),
    (replace(INT8, block=64), 300, 5, 300),
    (replace(INT4_ZERO, block=None), 300, 1, 150),
]


@pytest.mark.parametrize("format, width, blocks, size", COUNTS, ids=lambda x: repr(x))
def test_counts(format, width, blocks, size):
    assert num_blocks(format, width) == blocks
    assert num_bytes(format, width) == size
