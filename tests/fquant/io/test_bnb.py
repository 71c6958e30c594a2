"""Tests of fquant.io.bnb: bitsandbytes' tensors are read, and written byte for byte."""

import json
from dataclasses import replace

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, int8_vectorwise_dequant, quantize_4bit

from fquant import tree
from fquant.format import DYNAMIC8, FP4, INT8, NF4, NF4_DQ
from fquant.io import safetensors
from fquant.io.bnb import load, save
from fquant.packed import FLOATS, Packed, dequantize, quantize
from tests.helpers.arrays import same_bits

NAME = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__"


@pytest.fixture(autouse=True)
def eager():
    """Keep bitsandbytes from compiling its own reference for large blocks."""
    with torch.compiler.set_stance("force_eager"):
        yield


def weight(*shape, dtype=torch.float32):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    w.view(-1)[:5] = 0.0
    return w.to(dtype)


def theirs(w, kind="nf4", nested=False, block=64, storage=torch.uint8):
    """Return bitsandbytes' tensors of a checkpoint and its decoded weight."""
    codes, state = quantize_4bit(w, None, None, block, nested, kind, storage)
    tensors = {f"{NAME}.{key}": t for key, t in state.as_dict(packed=True).items()}
    return {NAME: codes} | tensors, dequantize_4bit(codes, state)


SHAPES = {"rows": (6, 128), "straddling": (6, 100), "odd": (5, 33), "many": (700, 64), "experts": (3, 4, 64)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_4bit_both_ways(dtype, kind, nested, shape):
    tensors, decoded = theirs(weight(*shape, dtype=dtype), kind, nested)
    p = load(tensors, NAME)
    assert torch.equal(dequantize(p), decoded) and dequantize(p).dtype == dtype
    assert p.shape == shape and p.format.flat == bool(shape[-1] % 64)
    again = save(p, NAME)
    assert again.keys() == tensors.keys()
    for key, t in tensors.items():
        assert (again[key].dtype, again[key].shape) == (t.dtype, t.shape), key
        assert again[key].reshape(-1).view(torch.uint8).equal(t.reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("block", [32, 64, 256, 4096])
def test_rows_are_what_quantize_gives(block):
    w = weight(6, 4096, dtype=torch.bfloat16)
    for format, kind, nested in ((NF4, "nf4", False), (NF4_DQ, "nf4", True), (FP4, "fp4", False)):
        format = replace(format, block=block)
        got, wanted = load(theirs(w, kind, nested, block)[0], NAME), quantize(w, format)
        assert got.format == wanted.format and got.shape == wanted.shape and got.dtype == wanted.dtype
        assert torch.equal(got.codes, wanted.codes)
        if nested:
            assert got.scale.format == DYNAMIC8 and got.scale.shape == wanted.scale.shape
            assert same_bits(got.scale.codes, wanted.scale.codes) and same_bits(got.scale.scale, wanted.scale.scale)
            assert same_bits(got.scale.offset, wanted.scale.offset)
        else:
            assert same_bits(got.scale, wanted.scale)
        assert torch.equal(dequantize(got), dequantize(wanted))


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_blocks_that_straddle_rows_stay_flat(nested):
    tensors, decoded = theirs(weight(61, 100), "nf4", nested)
    p = load(tensors, NAME)
    assert p.format == replace(NF4_DQ if nested else NF4, flat=True)
    assert p.codes.dtype == torch.uint8 and p.codes.shape == (61 * 50,)
    if nested:
        assert isinstance(p.scale, Packed) and p.scale.format == DYNAMIC8
        assert p.scale.shape == tuple(p.scale.codes.shape) == (96,) and p.scale.scale.shape == (1,)
    else:
        assert p.scale.dtype == torch.float32 and p.scale.shape == (96,)
    assert torch.equal(dequantize(p), decoded)


@pytest.mark.parametrize("storage", [torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(8, 128), (8, 100)], ids=str)
def test_storage_is_bytes_whatever_its_dtype(shape, storage):
    tensors, decoded = theirs(weight(*shape), "nf4", True, storage=storage)
    assert tensors[NAME].dtype == storage
    p = load(tensors, NAME)
    assert p.codes.dtype == torch.uint8 and torch.equal(dequantize(p), decoded)
    assert torch.equal(save(p, NAME)[NAME].view(-1), tensors[NAME].view(torch.uint8).view(-1))


def test_a_module_and_a_file(tmp_path):
    """Read Linear4bit's state dict from a file, and load ours with bitsandbytes."""
    layer = bnb.nn.Linear4bit(128, 16, bias=True, quant_type="nf4")
    layer.load_state_dict({"weight": weight(16, 128), "bias": weight(16)})
    layer = layer.to("cpu")
    prefix = NAME.removesuffix("weight")
    state = {prefix + key: t.detach() for key, t in layer.state_dict().items()}
    safetensors.write(tmp_path / "model.safetensors", state)
    header = safetensors.header(tmp_path / "model.safetensors")
    p = load({key: safetensors.read(header, key) for key in header.tensors}, NAME)
    assert p.format == NF4_DQ
    decoded = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert torch.equal(dequantize(p), decoded)
    ours = save(p, NAME)
    stats = {key.removeprefix(f"{NAME}."): t for key, t in ours.items() if key != NAME}
    back = bnb.nn.Params4bit.from_prequantized(ours[NAME], stats, device="cpu")
    assert torch.equal(dequantize_4bit(back.data, back.quant_state), decoded)


def test_what_was_quantised_here_is_read_there():
    for format in (NF4, NF4_DQ, FP4, replace(NF4, block=128), replace(NF4_DQ, flat=True)):
        p = quantize(weight(9, 384, dtype=torch.float16), format)
        ours = save(p, NAME)
        state = QuantState.from_dict({k.removeprefix(f"{NAME}."): t for k, t in ours.items() if k != NAME}, "cpu")
        assert torch.equal(dequantize_4bit(ours[NAME], state), dequantize(p))
    p = quantize(weight(9, 384), NF4_DQ)
    plain = replace(p, scale=dequantize(p.scale), format=p.format.plain)
    assert torch.equal(dequantize(load(save(plain, NAME), NAME)), dequantize(p))


def theirs8(w):
    layer = bnb.nn.Linear8bitLt(w.shape[1], w.shape[0], bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(w, False, False)  # pyright: ignore[reportCallIssue]
    layer = layer.to("cpu")
    return {NAME.removesuffix("weight") + key: t.detach() for key, t in layer.state_dict().items()}


def test_8bit_both_ways():
    w = weight(12, 100, dtype=torch.float16)
    tensors = theirs8(w)
    scb = NAME.removesuffix("weight") + "SCB"
    assert set(tensors) == {NAME, scb, NAME.removesuffix("weight") + "weight_format"}
    p, wanted = load(tensors, NAME), quantize(w, INT8)
    assert p.format == INT8 and p.dtype == torch.float32
    assert torch.equal(p.codes, wanted.codes) and torch.equal(p.scale, wanted.scale)
    assert torch.equal(dequantize(p), int8_vectorwise_dequant(tensors[NAME], tensors[scb]))
    for again in (save(p, NAME), save(wanted, NAME)):
        assert again.keys() == tensors.keys()
        assert all(same_bits(again[key], t) for key, t in tensors.items())


# --- bad input --------------------------------------------------------------------------------------------------------


def state(**changes):
    """Return the tensors of a nested weight with these keys of the JSON changed, or removed if None."""
    tensors, _ = theirs(weight(6, 128), nested=True)
    found = json.loads(bytes(tensors[STATE + "nf4"].tolist()))
    found = {key: x for key, x in (found | changes).items() if x is not None}
    return tensors | {STATE + "nf4": torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)}


def changed(nested=True, **changes):
    """Return the tensors of a weight with some replaced, or removed if None; underscores stand for dots."""
    tensors, _ = theirs(weight(6, 128), nested=nested)
    full = {f"{NAME}.{key}" if key != "weight" else NAME: t for key, t in changes.items()}
    return {key: t for key, t in (tensors | full).items() if t is not None}


def changed8(**changes):
    prefix = NAME.removesuffix("weight")
    tensors = theirs8(weight(6, 128, dtype=torch.float16)) | {prefix + key: t for key, t in changes.items()}
    return {key: t for key, t in tensors.items() if t is not None}


blob = lambda text: torch.tensor(list(text), dtype=torch.uint8)
JSON = "quant_state.bitsandbytes__nf4"
STATES = rf"wanted exactly one of quant_state\.bitsandbytes__nf4 and {JSON.replace('nf4', 'fp4')}"
REFUSED = {
    "no weight": ({}, "there is no such tensor; check the name"),
    "plain weight": ({NAME: weight(2, 2)}, "so it is not quantised; load it as it is"),
    "absmax missing": (changed(absmax=None), "tensors beside it: missing absmax, unknown none"),
    "map missing": (changed(quant_map=None), "missing quant_map, unknown none"),
    "half nested": (changed(nested_absmax=None), "missing nested_absmax, unknown none"),
    "unknown tensor": (changed(extra=weight(2)), "missing none, unknown extra; wanted absmax, nested_absmax"),
    "unknown below": (changed(**{"absmax.more": weight(2)}), "missing none, unknown absmax.more"),
    "SCB too": (changed() | {NAME.removesuffix("weight") + "SCB": weight(6)}, "missing none, unknown SCB"),
    "no state": (changed(**{JSON: None}), f"got quant_state none; {STATES}"),
    "two states": (changed(**{JSON.replace("nf4", "fp4"): blob(b"{}")}), STATES),
    "state of af4": (changed(**{JSON: None, JSON.replace("nf4", "af4"): blob(b"{}")}), STATES),
    "not JSON": (changed(**{JSON: blob(b"{")}), r"bitsandbytes__nf4: got no JSON \(.*\), .*; the file is damaged"),
    "not UTF-8": (changed(**{JSON: blob(b"\xff")}), r"bitsandbytes__nf4: got no JSON \(.*utf-8"),
    "a list": (changed(**{JSON: blob(b"[1]")}), "got a JSON list, wanted an object"),
    "twice": (changed(**{JSON: blob(b'{"a": 1, "a": 2}')}), r"got no JSON \(a name occurs twice\)"),
    "floats": (changed(**{JSON: weight(3)}), r"got torch.float32 \(3,\); wanted JSON as uint8 \[bytes\]"),
    "unknown key": (state(extra=1), "keys: missing none, unknown extra; wanted blocksize"),
    "missing key": (state(dtype=None), "keys: missing dtype, unknown none"),
    "key of nested": (
        changed(nested=False, **{JSON: state()[STATE + "nf4"]}),
        "unknown nested_blocksize, nested_dtype",
    ),
    "other type": (state(quant_type="fp4"), "quant_type: got 'fp4', wanted 'nf4'"),
    "dtype": (state(dtype="float64"), "dtype: got 'float64', wanted 'float32' or 'bfloat16' or 'float16'"),
    "block": (state(blocksize=48), "block is 48; wanted one of 16"),
    "block of text": (state(blocksize="64"), "blocksize: got '64', wanted a positive integer"),
    "other block": (state(blocksize=128), r"absmax: got torch.uint8 \(12,\); wanted torch.uint8 \(6,\)"),
    "shape of text": (state(shape="x"), "shape: got 'x', wanted a list of positive"),
    "empty shape": (state(shape=[]), r"shape: got \[\], wanted a list of positive integers"),
    "shape of floats": (state(shape=[6.0, 128]), r"shape: got \[6.0, 128\], wanted a list"),
    "another shape": (state(shape=[7, 128]), "got 384 bytes of codes; wanted 448 for the shape"),
    "nested block": (state(nested_blocksize=128), "nested_blocksize: got 128, wanted 256"),
    "nested dtype": (state(nested_dtype="float16"), "nested_dtype: got 'float16', wanted 'float32'"),
    "offset": (state(nested_offset=float("nan")), "nested_offset: got nan, wanted a finite number"),
    "codes of other dtype": (changed(weight=torch.zeros(96, 1, dtype=torch.int32)), "got torch.int32 for the codes"),
    "transposed": (
        changed(weight=torch.zeros(1, 384, dtype=torch.uint8)),
        r"codes of shape \(1, 384\); wanted \[bytes 1\]",
    ),
    "absmax dtype": (changed(absmax=weight(12)), r"absmax: got torch.float32 \(12,\); wanted torch.uint8 \(12,\)"),
    "absmax NaN": (changed(False, absmax=torch.full((12,), torch.nan)), "absmax: got values that are NaN or infinite"),
    "nested absmax": (changed(nested_absmax=weight(2)), r"nested_absmax: got .*\(2,\); wanted torch.float32 \(1,\)"),
    "map": (changed(quant_map=torch.linspace(-1, 1, 16)), "quant_map: got another table than nf4_dq's"),
    "nested map": (
        changed(nested_quant_map=torch.linspace(-1, 1, 256)),
        "nested_quant_map: got another table than dyn",
    ),
    "int8 of f16": (
        changed8(weight=weight(6, 128)),
        r"got torch.float32 \(6, 128\) beside an SCB; wanted int8 \[out in\]",
    ),
    "int8 layout": (
        changed8(weight_format=torch.tensor(1, dtype=torch.uint8)),
        r"weight_format is 1; wanted 0 \(rows\)",
    ),
    "int8 no SCB": (changed8(SCB=None), "missing SCB, unknown none; wanted SCB, weight_format"),
    "int8 no layout": (changed8(weight_format=None), "missing weight_format, unknown none"),
    "int8 SCB": (changed8(SCB=weight(7)), r"SCB: got torch.float32 \(7,\); wanted torch.float32 \(6,\)"),
}


@pytest.mark.parametrize("tensors, message", REFUSED.values(), ids=REFUSED)
def test_load_refuses(tensors, message):
    with pytest.raises(ValueError, match=rf"^{NAME}: .*{message}"):
        load(tensors, NAME)


W = weight(6, 100)
STACKED = tree.map(lambda t: t.expand(2, *t.shape), quantize(weight(6, 128), NF4))
UNSAVED = {
    "short last blocks": (
        quantize(W, NF4),
        "width 100 is not a multiple of the block 64, .* short block at the end of",
    ),
    "blocks of int8": (quantize(W, replace(INT8, block=64)), "one scale a row; got Format"),
    "another table": (quantize(W, replace(NF4, name="mine", table=(0.0,) * 15 + (1.0,))), "has no mine; wanted nf4 or"),
    "dynamic": (quantize(W, DYNAMIC8), "has no dynamic8; wanted nf4 or fp4"),
    "a stack": (STACKED, "got 768 bytes of codes; wanted 384 for the shape"),
}


@pytest.mark.parametrize("packed, message", UNSAVED.values(), ids=UNSAVED)
def test_save_refuses(packed, message):
    with pytest.raises(ValueError, match=rf"^{NAME}: .*{message}"):
        save(packed, NAME)
