"""Random bits: every backend gives those of the reference, as one op that all transforms accept.

Tests marked ``interpreted`` run the Triton kernels in Triton's interpreter, or on the card of ``--device``
(tests/helpers/kernels/interpreter.py).
"""

import ctypes
import math
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import random, remat
from fquant.kernels import cpu, dispatch, reference
from fquant.kernels.cpu import library
from fquant.kernels.ops import random_bits
from tests.helpers.arrays import named, rng
from tests.helpers.formats import ISAS, built, forced, shifted, strided
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401
from tests.helpers.kernels.threads import num_threads
from tests.helpers.live_memory import Peak

BACKENDS = ("reference", *ISAS)
INTS = st.sampled_from([0, -1, 2**63 - 1, -(2**63), 2**32, -(2**32), 0xFFFFFFFF]) | st.integers(-(2**63), 2**63 - 1)
SIZES = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 1001, 8191, 8192, 8193, 20_001]) | st.integers(0, 300)
THRESHOLDS = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32]) | st.integers(0, 2**32)
PLACES = (lambda t: t, shifted, strided, lambda t: t.mT.contiguous().mT if t.ndim > 1 else t)
KEYS = random.fold(random.key(3), torch.arange(6)).reshape(2, 3)


def any_ints(shape, seed=0):
    """Draw integers of uniform bit patterns."""
    halves = torch.randint(0, 2**32, (2, *shape), generator=rng(seed))
    return (halves[0] << 32) | halves[1]


@st.composite
def keys(draw, most=3):
    shape = draw(st.lists(st.integers(0, most), max_size=2))
    flat = draw(st.lists(INTS, min_size=math.prod(shape), max_size=math.prod(shape)))
    return draw(st.sampled_from(PLACES))(torch.tensor(flat, dtype=torch.int64).reshape(shape))


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous() and torch.equal(a, b)


def assert_draws(key, threshold, shape):
    words = reference.bits(key.cpu(), shape)
    assert same(random_bits.bits(key, shape).cpu(), words)
    assert same(random_bits.bernoulli(key, threshold, shape).cpu(), words < threshold)


def assert_folds(key, data):
    assert same(random_bits.fold(key, data).cpu(), reference.fold(key.cpu(), data.cpu()))


# --- the words --------------------------------------------------------------------------------------------------------


@named("backend", BACKENDS)
@given(
    key=keys(),
    threshold=THRESHOLDS,
    size=SIZES,
    more=st.sampled_from([(), (1,), (2,), (3,)]),
    threads=st.integers(1, 3),
)
@settings(max_examples=40)
def test_draws(backend, key, threshold, size, more, threads):
    with num_threads(threads), forced(backend):
        assert_draws(key, threshold, (size, *more))
        assert_draws(key, threshold, more)


@named("backend", BACKENDS)
@given(key=keys(), other=keys(), number=INTS)
@settings(max_examples=40)
def test_folds(backend, key, other, number):
    with forced(backend):
        assert_folds(key, torch.tensor(number))
        assert_folds(key[..., None, None], other)
        assert_folds(other, key[..., None, None])


@named("backend", BACKENDS)
def test_the_reference_is_the_scalar_generator(backend):
    """At positions on both sides of the boundaries of units of work."""
    key, some = -7, torch.tensor([0, 1, 2, 8190, 8191, 8192, 8193, 16383, 16384, 40_000])
    mask = reference.MASK
    with forced(backend):
        drawn = random_bits.bits(torch.tensor(key), (40_001,))[some]
        new = int(random_bits.fold(torch.tensor(key), torch.tensor(11 << 32 | 5)))
    halves = lambda x: (x & mask, x >> 32 & mask)
    assert drawn.tolist() == [reference.threefry(halves(key), (i // 2, 0))[i % 2] for i in some.tolist()]
    assert halves(new)[::-1] == reference.threefry(halves(key ^ reference.FOLDED), (5, 11))


@named("backend", BACKENDS)
def test_a_threshold_is_exact(backend):
    key = torch.tensor(5)
    words = reference.bits(key, (40,))
    with forced(backend):
        for i, word in enumerate(words.tolist()):
            assert not random_bits.bernoulli(key, word, (40,))[i] and random_bits.bernoulli(key, word + 1, (40,))[i]
        assert random_bits.bernoulli(key, 2**32, (40,)).all() and not random_bits.bernoulli(key, 0, (40,)).any()


@named("backend", BACKENDS)
def test_many_keys_and_long_streams(backend):
    with forced(backend):
        assert_draws(any_ints((3000,)), 2**31, (5,))
        assert_draws(any_ints((2,)), 2**31, (100_003,))
        assert_draws(torch.tensor(1).expand(4, 3), 2**31, (9,))
        assert_folds(any_ints((300, 1)), any_ints((77,), 1))


# --- what they take ---------------------------------------------------------------------------------------------------


@built
def test_a_mask_takes_a_byte_an_element_and_nothing_beside():
    shape = (256, 1024)
    with Peak() as peak:
        cpu.bernoulli(KEYS, 2**31, shape)
    assert peak.most == 6 * math.prod(shape)
    with Peak() as peak:
        cpu.bits(KEYS, shape)
    assert peak.most == 6 * math.prod(shape) * 8
    x = torch.ones(shape, dtype=torch.bfloat16)
    with forced("cpu"), Peak() as peak:
        random.dropout(x, 0.1, KEYS[0, 0])
    assert peak.most <= math.prod(shape) * (1 + 2 + 2) + 64  # the mask, x scaled, the result


def nodes(f, *args):
    graph = make_fx(f, tracing_mode="fake")(*args).graph
    return [str(node.target).removesuffix(".default") for node in graph.nodes if node.op == "call_function"]


def test_how_many_nodes_a_draw_is():
    k, x = KEYS[0, 0], torch.ones(4, 8)
    assert nodes(lambda k: random.bits(k, (4, 8)), k) == ["fquant.bits"]
    assert nodes(lambda k: random.bernoulli(k, 0.1, (4, 8)), k) == ["fquant.bernoulli"]
    assert nodes(random.fold, k, k) == ["fquant.fold"]
    assert nodes(lambda k: random.fold(k, "a name"), k) == ["aten.full", "fquant.fold"]
    f = lambda x, k: random.dropout(x, 0.1, k)
    seen = nodes(f, x, k)
    assert len(seen) == 4 and seen.count("fquant.bernoulli") == 1
    both = nodes(lambda x, g, k: vjp(lambda x: f(x, k), x)[1](g), x, x, k)
    assert len(both) <= 7 and both.count("fquant.bernoulli") == 1
    assert nodes(vmap(f), x, KEYS.reshape(6)[:4]).count("fquant.bernoulli") == 1


# --- transforms -------------------------------------------------------------------------------------------------------

P, B, T = 0.4, 3, 10
X, V = (torch.randn(B, T, generator=rng(seed), dtype=torch.float64) for seed in (0, 1))
ONE_EACH = random.fold(random.key(4), torch.arange(B))


def masks_of(key):
    """Return the masks that ``dropped`` draws from a key, by the reference and outside of every transform."""
    return torch.stack(
        [reference.bernoulli(k, round((1 - P) * 2**32), (T,)) for k in (key, random.fold(key, "second"))]
    )


MASKS = torch.stack([masks_of(key) for key in ONE_EACH])  # [B 2 T]


def dropped(x, key):
    """Return a scalar with derivatives of every order."""
    return wave(random.dropout(x, P, key), random.dropout(x.sin(), P, random.fold(key, "second")))


def masked(x, masks):
    """Return the same from masks that were drawn before."""
    return wave(*(torch.where(mask, y * (1 / (1 - P)), 0.0) for mask, y in zip(masks, (x, x.sin()), strict=True)))


def wave(y, z):
    return (y * z + y).sin().sum()


def pushed(f):
    return lambda x, v, k: jvp(lambda x: f(x, k), (x,), (v,))[1]


def pulled(f):
    return lambda x, v, k: v.sum() * vjp(lambda x: f(x, k), x)[1](torch.ones_like(v.sum()))[0]


def dynamo(f, **options):
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=True, **options)


TRANSFORMS = {  # of f, B rows and directions, and k: keys [B] or masks
    "vmap": lambda f, x, v, k: vmap(f)(x, k),
    "vmap, one key": lambda f, x, v, k: vmap(f, (0, None))(x, k[1]),
    "vmap, one x": lambda f, x, v, k: vmap(f, (None, 0))(x[0], k),
    "vmap along the last dim": lambda f, x, v, k: vmap(f, (1, -1))(x.mT, k.movedim(0, -1)),
    "vmap of vmap": lambda f, x, v, k: vmap(vmap(f, (None, 0)), (0, None))(x, k),
    "grad": lambda f, x, v, k: grad(f)(x[0], k[0]),
    "vmap of grad": lambda f, x, v, k: vmap(grad(f))(x, k),
    "jvp": lambda f, x, v, k: pushed(f)(x[0], v[0], k[0]),
    "vmap of jvp": lambda f, x, v, k: vmap(pushed(f))(x, v, k),
    "vjp": lambda f, x, v, k: pulled(f)(x[0], v[0], k[0]),
    "vmap of vjp": lambda f, x, v, k: vmap(pulled(f))(x, v, k),
    "grad of jvp": lambda f, x, v, k: vmap(grad(pushed(f)))(x, v, k),
    "jvp of grad": lambda f, x, v, k: vmap(pushed(grad(f)))(x, v, k),
    "remat": lambda f, x, v, k: vmap(grad(remat(f)))(x, k),
    "make_fx": lambda f, x, v, k: make_fx(vmap(grad(f)), tracing_mode="fake")(x, k)(v, k.flip(0)),
    "compile": lambda f, x, v, k: dynamo(grad(f))(x[0], k[0]),
    "compile of vmap": lambda f, x, v, k: dynamo(vmap(grad(f)))(x, k),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform, device):
    wanted = transform(masked, X, V, MASKS)
    for backend in ("reference", dispatch.backend(device.type)[0]):
        with forced(backend):
            got = transform(dropped, *(t.to(device) for t in (X, V, ONE_EACH)))
        assert got.abs().max() > 0
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-12, atol=1e-12)


def test_vmap_of_fold(device):
    """Either or both are mapped, along any dim, with different ranks."""
    key, data = any_ints((2, 3)).to(device), any_ints((4, 2, 3), 1).to(device)
    loop = lambda f, n: torch.stack([f(i) for i in range(n)])
    assert same(
        vmap(random_bits.fold)(key, data.movedim(1, 0)), loop(lambda i: random_bits.fold(key[i], data[:, i]), 2)
    )
    assert same(vmap(random_bits.fold, (None, 0))(key, data), loop(lambda i: random_bits.fold(key, data[i]), 4))
    assert same(vmap(random_bits.fold, (1, 2))(key, data), loop(lambda i: random_bits.fold(key[:, i], data[..., i]), 3))
    assert same(
        vmap(random_bits.fold, (0, None))(key[:, 0], data), loop(lambda i: random_bits.fold(key[i, 0], data), 2)
    )
    both = vmap(vmap(random_bits.fold, (None, 0)), (0, None))(key[0], data[:, 0, 0])
    assert same(both, random_bits.fold(key[0, :, None], data[:, 0, 0]))


def test_vmap_of_draws(device):
    """A key with several dims is mapped along each of them."""
    keys = KEYS.to(device)
    for draw in (lambda k: random_bits.bits(k, (5,)), lambda k: random_bits.bernoulli(k, 2**31, (2, 2))):
        for dim in (0, 1):
            assert same(vmap(draw, dim)(keys), torch.stack([draw(k) for k in keys.unbind(dim)]))
        assert same(vmap(vmap(draw), 1)(keys), draw(keys.mT))


def test_compiled_for_sizes_that_change():
    f = lambda x, k: (random.dropout(x, P, k), random.bits(k, tuple(x.shape)))
    compiled = dynamo(f, dynamic=True)
    for n in (6, 7, 40):
        assert all(map(torch.equal, compiled(torch.ones(3, n), ONE_EACH), f(torch.ones(3, n), ONE_EACH)))


def test_schemas_and_fake_results_are_true():
    """torch's own check of schemas, and of shapes, dtypes and strides of fake results."""
    ops, every = (
        torch.ops.fquant,
        ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    check = lambda op, *args: torch.library.opcheck(op.default, args, test_utils=every)
    keys = [("reference", key) for key in (KEYS, KEYS.mT, KEYS[0, 0], KEYS[:0])]
    for backend, key in (*keys, *((isa, KEYS.mT) for isa in ISAS[-1:])):  # fake results are the same for all backends
        with forced(backend):
            check(ops.fold, key, torch.tensor(3))
            check(ops.fold, key[..., None], torch.arange(4))
            for shape in ((), (3,), (2, 5), (0,)):
                check(ops.bits, key, shape)
                check(ops.bernoulli, key, 2**31, shape)


def test_a_fake_draw_is_fake():
    with FakeTensorMode() as mode:
        key = mode.from_tensor(KEYS)
    for t in (random_bits.fold(key, key), random_bits.bits(key, (3,)), random_bits.bernoulli(key, 1, (3,))):
        assert type(t) is FakeTensor
    assert random_bits.bernoulli(KEYS.to("meta"), 1, (3,)).is_meta


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_number_on_the_cpu_joins_what_is_elsewhere():
    there, number = KEYS.to("meta"), torch.tensor(3)
    assert random_bits.fold(there, number).is_meta and random_bits.fold(number, there).is_meta
    with pytest.raises(ValueError, match="fold got a key on meta and data on cpu; move one"):
        random_bits.fold(there, KEYS)


MALFORMED = {
    "float keys": (lambda k: random_bits.bits(k.float(), (2,)), TypeError, r"bits got torch.float32 \(2, 3\); wanted"),
    "int32 keys": (lambda k: random_bits.bernoulli(k.int(), 1, (2,)), TypeError, "bernoulli got torch.int32 .*; want"),
    "int32 data": (lambda k: random_bits.fold(k, k.int()), TypeError, "fold got torch.int32 .*; wanted int64"),
    "a key to fold": (lambda k: random_bits.fold(k.bool(), k), TypeError, "fold got torch.bool .*; wanted int64"),
    "below": (lambda k: random_bits.bernoulli(k, -1, (2,)), ValueError, r"threshold of -1; wanted one in \[0, 2\^32\]"),
    "above": (lambda k: random_bits.bernoulli(k, 2**32 + 1, ()), ValueError, "threshold of 4294967297; wanted one in"),
    "shapes": (lambda k: random_bits.fold(k, k.mT), RuntimeError, "[Ss]hape mismatch|broadcast|must match"),
}  # fmt: skip


@named("device", ["cpu", "meta"])
@pytest.mark.parametrize("call, error, message", MALFORMED.values(), ids=MALFORMED)
def test_malformed(call, error, message, device, no_kernel):
    with pytest.raises(error, match=message):
        call(KEYS.to(device))


@built
def test_a_library_that_lacks_them_is_of_other_sources(monkeypatch):
    class Older:
        def fquant_size(self, which):
            return ctypes.sizeof((library.Packed, library.Encoding)[which])

    monkeypatch.setattr(ctypes, "CDLL", lambda path: Older())
    with pytest.raises(ImportError, match="was built from other sources; install fquant again"):
        library.load.__wrapped__()


# --- in Triton ------------------------------------------------------------------------------------------------------

triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; pip install triton")


@triton
@pytest.mark.xdist_group("interpreter")
@interpreted
def test_triton_draws(device):
    for stack, shape in [((), ()), ((3,), (1,)), ((2, 2), (2,)), ((2,), (5, 3)), ((0,), (3,)), ((3,), (0,)),
                         ((), (1023,)), ((2,), (1024,)), ((1,), (1025,)), ((2, 2), (3001,))]:  # fmt: skip
        for place, threshold in zip(PLACES, (0, 1, 2**31 + 5, 2**32), strict=True):
            assert_draws(place(any_ints(stack).to(device)), threshold, shape)


@triton
@pytest.mark.xdist_group("interpreter")
@interpreted
def test_triton_folds(device):
    for key, data in [((), ()), ((3,), ()), ((), (600,)), ((2, 1), (700,)), ((0,), ()), ((5, 3), (5, 3))]:
        for place in PLACES:
            assert_folds(place(any_ints(key).to(device)), place(any_ints(data, 1).to(device)))


@triton
@pytest.mark.xdist_group("interpreter")
@interpreted
def test_dropout_in_triton(device):
    assert dispatch.backend(device.type)[0] == "triton"
    got = vmap(grad(dropped))(X.to(device), ONE_EACH.to(device))
    torch.testing.assert_close(got.cpu(), vmap(grad(masked))(X, MASKS), rtol=1e-12, atol=1e-12)
