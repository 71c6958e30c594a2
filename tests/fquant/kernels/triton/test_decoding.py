"""Attention to the slots of a cache in Triton, against the formula in float64; compiled for GPUs."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from fquant.kernels import reference
from fquant.kernels.ops.decoding import cached_attention
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.formats import alike, shifted, strided
from tests.helpers.kernels.ahead_of_time import TARGETS, TENSOR_CORES, assert_fits, compiled_for, uses
from tests.helpers.kernels.decoding import DTYPES, OPTIONS, assert_right, drawn
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("interpreter")
F32, BF16, F16 = DTYPES


def module():
    return import_module("fquant.kernels.triton.decoding")


def planned(slots, parts=None, warps=4, stages=1):
    """Return the op by a plan."""
    decoding = module()
    return lambda *args: decoding.cached_attention(*args, plan=decoding.Split(slots, warps, stages, parts))


def with_options(given, options):
    """Return the arguments of a call for ``given`` of ``drawn``."""
    return *given[:4], options.get("scale"), options.get("cap"), given[4] if options.get("sinks") else None


# --- values -----------------------------------------------------------------------------------------------------------


@named("dtype", DTYPES)
@interpreted
def test_the_formula(device, dtype):
    """By the plan of the op: one slot and many, groups of every kind, heads that are powers of two and not."""
    for size in ((3, 77, 2, 6, 16), (2, 40, 1, 5, 24), (2, 130, 3, 3, 8), (1, 1, 1, 9, 130), (1, 70, 1, 17, 256)):
        for options in OPTIONS:
            assert_right(*with_options(drawn(*size, dtype, device), options))


@interpreted
def test_positions_around_the_borders_of_tiles(device):
    """The first slot, the last ones of a tile and of the cache, and positions behind it."""
    for slots, parts in ((64, 2), (65, 3), (96, 1)):
        for position in (0, 1, 30, 31, 32, 33, 62, 63, 64, slots - 1, slots, 10**6):
            given = drawn(1, slots, 1, 2, 16, BF16, device, [position])
            assert_right(*given[:4], compute=planned(32, parts))


@interpreted
def test_any_call(device):
    on_host = device.type == "cpu"

    @settings(max_examples=30 if on_host else 12, deadline=None)
    @given(
        sizes=st.tuples(*(st.integers(1, n) for n in (3, 130, 3, 4))), position=st.integers(0, 140),
        e=st.sampled_from([1, 8, 16, 40, 96] if on_host else [16, 40]), dtype=st.sampled_from(DTYPES),
        tile=st.sampled_from([16, 32, 64] if on_host else [32]), parts=st.none() | st.integers(1, 7),
        options=st.sampled_from(OPTIONS), place=st.sampled_from([lambda t: t, shifted, strided]),
    )  # fmt: skip
    def check(sizes, position, e, dtype, tile, parts, options, place):
        b, slots, kv, group = sizes
        given = [place(t) for t in drawn(b, slots, kv, kv * group, e, dtype, device, [position, 0, slots - 1][:b])]
        assert_right(*with_options(given, options), compute=planned(tile, parts))

    check()


@named("i", range(18))
@interpreted
def test_each_candidate(device, i):
    """The plans that a sweep tries on a card."""
    candidates = module().CANDIDATES
    assert len(candidates) == 18
    given = drawn(2, 150, 1, 3, 16, BF16, device)
    assert_right(*given[:4], compute=lambda *args: module().cached_attention(*args, plan=candidates[i]))


@interpreted
def test_scores_of_any_size(device):
    """Scores whose exponentials overflow float32, so that the softmax selects one slot, in any part."""
    for best in (0, 40, 99):
        q, k, v, position, sinks = drawn(1, 100, 1, 2, 8, F32, device, [99])
        k[..., 0], q = torch.arange(100, device=device)[:, None] == best, torch.eye(8, device=device)[0].expand_as(q)
        for size in (1e3, 1e15, 1e30):
            for parts in (1, 4):
                y = planned(32, parts)(size * q, k, v, position, None, None, sinks)
                assert torch.equal(y[0], v[:, best, 0].expand(2, -1))


@interpreted
def test_larger_heads_and_float64_are_the_references(device):
    for e, dtype in ((257, BF16), (8, torch.float64)):
        *tensors, sinks = drawn(1, 20, 1, 2, e, dtype, device)
        args = *tensors, None, None, sinks.to(torch.promote_types(dtype, F32))
        assert alike(cached_attention(*args), reference.cached_attention(*args))


@interpreted
def test_nothing(device):
    q, k, v, position, _ = drawn(1, 5, 1, 2, 8, F32, device)
    assert cached_attention(q[:0], k[:0], v[:0], position[:0]).shape == (0, 2, 8)


# --- bits -------------------------------------------------------------------------------------------------------------


@interpreted
def test_slots_behind_the_position_are_not_read(device):
    q, k, v, position, _ = drawn(3, 77, 2, 6, 16, BF16, device)
    wanted = cached_attention(q, k, v, position)
    seen = torch.arange(77, device=device) <= position[:, None]
    k, v = (t.masked_fill(~seen[..., None, None], torch.nan) for t in (k, v))
    assert alike(cached_attention(q, k, v, position), wanted)


@named("parts", [1, 3, 8])
@interpreted
def test_bits_depend_on_nothing_but_the_numbers_and_the_parts(device, parts):
    """Sums have a fixed order, so that a call, other sequences, strides and free slots change no bit."""
    compute, given = planned(32, parts), drawn(2, 140, 1, 2, 24, BF16, device)
    for options in OPTIONS[::3]:
        wanted = compute(*with_options(given, options))
        assert alike(compute(*with_options(given, options)), wanted)
        assert alike(compute(*with_options([t[1:2] for t in given], options)), wanted[1:2])
        for place in (shifted, strided):
            assert alike(compute(*with_options([place(t) for t in given], options)), wanted)
        q, k, v, position, sinks = given
        longer = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 60)) for t in (k, v))
        assert alike(compute(*with_options((q, *longer, position.clamp(max=139), sinks), options)), wanted)


@interpreted
def test_vmap(device):
    given = [torch.stack([t, t.flip(0)]) for t in drawn(3, 77, 2, 6, 16, F32, device)]
    got = vmap(lambda *args: cached_attention(*args[:4], None, None, args[4]))(*given)
    for i in range(2):
        q, k, v, position, sinks = (t[i] for t in given)
        assert_right(q, k, v, position, sinks=sinks, compute=lambda *_, i=i: got[i])


@interpreted
def test_parts_fill_a_device(device):
    """A cache of few tiles has no more parts than these, and a batch that fills the device has one."""
    parts_of = module().parts_of
    few, many = (torch.empty(n, 8, 64, device=device) for n in (1, 400))
    assert parts_of(few, 8, 3) == 3 and parts_of(few, 1, 10**6) == module().PARTS and parts_of(many, 8, 10**6) == 1


# --- without the interpreter ------------------------------------------------------------------------------------------


CASES = [  # b h kv e, the dtype, options
    (1, 32, 8, 128, BF16, {}), (1, 8, 4, 256, BF16, {"cap": 50.0}), (8, 32, 8, 64, BF16, {}), (1, 16, 2, 80, F16, {}),
    (1, 8, 8, 128, F32, {}),
]  # fmt: skip


@named("b, h, kv, e, dtype, options", slow_after(2, CASES))
@named("target", TARGETS)
def test_compiled(target, b, h, kv, e, dtype, options):
    """Products are those of tensor cores, keys are copied 16 bytes at a time, and nothing spills."""
    meta = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device="meta")
    cache, sinks, position = meta(b, 8192, kv, e), meta(b, h, dtype=F32), meta(b, dtype=torch.int64)
    with compiled_for(target) as reports:
        module().cached_attention(meta(b, h, e), cache, cache, position, sinks=sinks, **options)
    assert [r.name for r in reports] == ["_attend", "_merge"]
    list(map(assert_fits, reports))
    assert uses(reports[0], TENSOR_CORES[80]) and "cp.async.cg.shared.global [ %" in reports[0].ptx
