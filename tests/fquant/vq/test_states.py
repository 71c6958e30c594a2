"""Properties of all quantisers: files, dtypes, autocast, rows that are not finite, and codes beyond the state."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vmap

from fquant import jit, random, tree, vq
from fquant.io import safetensors
from fquant.vq import sharded
from fquant.vq.precision import matmul
from tests.helpers.arrays import assert_equal
from tests.helpers.vq import family
from tests.helpers.vq import scalar_cases as scalar
from tests.helpers.vq.peers import assert_close, drawn

K, D = 9, 4
LOSSES = ("commitment", "cross_entropy", "diversity", "orthogonal")
KEY = random.key(5)


class Case(NamedTuple):
    """A state, its verbs, the ``shape`` of an example's rows, and ``learns``: True if statistics update it."""

    state: Any
    shape: tuple[int, ...]
    encode: Callable[..., Any]
    decode: Callable[..., Any]
    apply: Callable[..., Any]
    update: Callable[..., Any]
    learns: bool


def book(**options):
    made = family.spread(vq.init(1, K, D, **options))
    if options.get("metric") == "cosine":
        made = replace(made, codes=vq.code_vectors(replace(made, learnable=True)))
    made = replace(made, sums=made.codes.clone())
    return vq.shift(made, vq.moments(made, 2 * drawn(50, D) + 1)) if options.get("affine") else made


def of_book(state, *shape, verbs=vq):
    def apply(state, x, key=None, mask=None, **options):
        return verbs.apply(state, x, key, mask=mask, **options)

    return Case(state, (5, *shape), verbs.encode, verbs.decode, apply, verbs.update, True)


def of(verbs, state, width, learns):
    return Case(state, (5, width), verbs.encode, verbs.decode, verbs.apply, verbs.update, learns)


CASES = {
    "book": of_book(book(), D),
    "cosine": of_book(book(metric="cosine"), D),
    "heads": of_book(book(heads=2), 2, D),
    "affine": of_book(book(affine=True), D),
    "learnable": of_book(book(learnable=True), D),
    "a part": of_book(sharded.take_codes(book(), 0, K), D, verbs=sharded),
    **{n: of(v, make(), family.DIM, n in family.LEARN) for n, (v, make) in family.STATES.items()},
    **{n: of(v, state, scalar.width(state), False) for n, (v, state, _) in scalar.CASES.items()},
}
BOOKS = ("book", "cosine", "heads", "affine", "learnable")
LEARN = [name for name, case in CASES.items() if case.learns]


def rows(name, examples=4, seed=0):
    return drawn(examples, *CASES[name].shape, seed=seed)


def total(out):
    return sum((vq.mean(loss).sum() for loss in out.losses.values()), out.x.float().sin().sum())


@pytest.mark.parametrize("name", LEARN)
def test_a_file_between_two_batches_of_one_update(name, tmp_path):
    """Accumulated stats are a tree like any other; vector-quantize-pytorch does not save them."""
    case = CASES[name]
    first, more = (case.apply(case.state, rows(name, seed=i), KEY, draw=True).stats for i in (0, 1))
    safetensors.save(tmp_path / "a", {"state": case.state, "stats": first})
    back = safetensors.load(tmp_path / "a")
    assert_equal(back, {"state": case.state, "stats": first})

    def after(state, stats):
        return case.update(state, tree.map(torch.add, stats, more))

    whole = after(case.state, first)
    assert_equal(after(back["state"], back["stats"]), whole)
    alone = case.update(case.state, more)
    assert any(not torch.equal(*both) for both in zip(tree.leaves(whole), tree.leaves(alone), strict=True))
    shown = case.update(back["state"], back["stats"], threshold=1.5)  # with the rows drawn before
    assert_equal(shown, case.update(case.state, first, threshold=1.5))


@pytest.mark.parametrize("name", LEARN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_leave_state_as_wide_as_it_was(name, dtype):
    case, x = CASES[name], rows(name).to(dtype)
    out, wide = case.apply(case.state, x, KEY, draw=True), case.apply(case.state, x.float(), KEY, draw=True)
    assert out.x.dtype is dtype and torch.equal(out.x, wide.x.to(dtype))
    assert_equal((out.codes, out.losses, out.stats), (wide.codes, wide.losses, wide.stats))
    after = case.update(case.state, out.stats, threshold=1.5)
    assert [t.dtype for t in tree.leaves(after)] == [t.dtype for t in tree.leaves(case.state)]
    assert_equal(after, case.update(case.state, wide.stats, threshold=1.5))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [name for name in LEARN if name != "a part"] + ["residual, outer"])
def test_what_is_drawn_is_of_the_number_of_a_row_among_all(name, masked):
    """Codes, noise, and rows for dead codes of a part of the examples are those of the whole."""
    name, _, outer = name.partition(", outer") if "outer" in name else (name, "", None)
    case, x = CASES[name], rows(name)
    mask = torch.arange(20).reshape(4, 5) % 7 != 2 if masked else torch.ones(4, 5, dtype=torch.bool)
    more: dict = {"gradient": vq.directional} if outer is None else {"gradient": vq.direct, "outer": vq.directional}
    more |= {"draw": True} | ({} if name == "implicit" else {"temperature": 0.5})

    def step(some):
        size = lambda t: len(t) if "hierarchical" in name else int(t.sum())  # hierarchical numbers examples
        row_offset = size(mask[: some.start]), size(mask)
        return case.apply(case.state, x[some], KEY, mask[some] if masked else None, row_offset=row_offset, **more)

    whole, parts = step(slice(0, 4)), [step(slice(*at)) for at in ((0, 1), (1, 1), (1, 4))]
    codes = tree.map(lambda *t: torch.cat(t), *(part.codes for part in parts))
    assert_equal(codes, whole.codes)
    assert_close(torch.cat([part.x for part in parts]), whole.x, 1e-5)
    assert_close(tree.map(lambda *t: sum(t), *(part.stats for part in parts)), whole.stats, 1e-5)


@pytest.mark.parametrize("name", LEARN)
def test_a_narrow_state_is_refused(name):
    """A cast of the model may reach it: in vector-quantize-pytorch bfloat16 codes are an eighth off after 200 steps."""
    case, message = CASES[name], "book: (codes|counts|sums) are torch.bfloat16; wanted float32, leave a Book out where"
    with pytest.raises(TypeError, match=message):
        case.apply(tree.map(lambda t: t.bfloat16(), case.state), rows(name), KEY)
    stats = case.apply(case.state, rows(name), KEY).stats
    for at in ("codes", "counts", "sums"):
        with pytest.raises(TypeError, match=message):
            case.update(tree.map_at(rf"(.*\.)?{at}", lambda t: t.bfloat16(), case.state), stats)


@pytest.mark.parametrize("name", [name for name in CASES if name != "projection"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_narrow_rows_are_those_of_wide_ones_rounded(name, dtype):
    case, x = CASES[name], rows(name).to(dtype)

    def loss(x):
        out = case.apply(case.state, x, KEY)
        weight = torch.linspace(-1, 1, out.x.shape[-1])
        return (out.x.float() * weight).sum() + sum(vq.mean(one).sum() for one in out.losses.values())

    got, wanted = grad(loss)(x), grad(loss)(x.float())
    assert got.dtype is dtype and got.isfinite().all() and wanted.any()
    assert (got.float() - wanted).norm() < 2 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("name", CASES)
def test_autocast_changes_nothing(name):
    """In vector-quantize-pytorch one code in seventy differs. Gradients are also taken outside, as torch advises."""
    case, x = CASES[name], rows(name).requires_grad_()
    more = {"losses": LOSSES, "gradient": vq.gumbel, "temperature": 0.5} if name in BOOKS else {}
    more |= {"draw": True} if case.learns else {}

    def step():
        out = case.apply(case.state, x, KEY, **more)
        after = case.update(case.state, out.stats, **({"threshold": 1.5} if case.learns else {}))
        return total(out), (out, case.encode(case.state, x), case.decode(case.state, out.codes), after)

    loss, wanted = step()
    slope = torch.autograd.grad(loss, x) if loss.requires_grad else ()
    with torch.autocast("cpu", torch.bfloat16):
        loss, got = step()
    assert_equal(got, wanted)
    assert_equal(torch.autograd.grad(loss, x) if loss.requires_grad else (), slope)


PRODUCTS = ("heads", "residual", "implicit", "simvq", "fsq, projected", "lfq", "binary")  # each by another path


@pytest.mark.parametrize("name", [n if n in PRODUCTS else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_derivatives_within_autocast_are_those_outside(name):
    """In bfloat16 they are up to a fiftieth off."""
    case, x = CASES[name], rows(name)
    more = {"losses": LOSSES, "gradient": vq.gumbel, "temperature": 0.5} if name in BOOKS else {}
    v = drawn(*x.shape, seed=3)

    def derivatives():
        loss = lambda state, x: total(case.apply(state, x, KEY, **more))
        each = vmap(grad(lambda x: loss(case.state, x)))(torch.stack([x, x.roll(1)])) if name not in BOOKS else ()
        slope = grad(lambda x: loss(case.state, x))
        twice = grad(lambda x: (slope(x) * v).sum())(x)
        return grad(loss)(case.state, x), slope(x), each, twice, jvp(lambda x: loss(case.state, x), (x,), (v,))[1]

    wanted = derivatives()
    with torch.autocast("cpu", torch.bfloat16):
        got = derivatives()
    for one, other in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (1, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (1, 4, 5))])
def test_products_are_mapped_within_autocast(shapes, in_dims):
    a, b = (
        drawn(*shape, seed=i) if at is None else drawn(6, *shape, seed=i).movedim(0, at)
        for i, (shape, at) in enumerate(zip(shapes, in_dims, strict=True))
    )
    derivatives = lambda f: vmap(lambda a, b: (f(a, b), grad(lambda a, b: f(a, b).sin().sum(), (0, 1))(a, b)), in_dims)
    wanted = derivatives(torch.matmul)(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        got = derivatives(matmul)(a, b)
    for one, other in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", LEARN)
def test_rows_that_are_not_finite_are_counted_and_poison_nothing(name):
    """Masked rows poison nothing either, for any content."""
    case, x = CASES[name], rows(name)
    lead = x.shape[:2]
    mask = torch.arange(lead.numel()).reshape(lead) % 7 != 2
    bad = torch.zeros(lead, dtype=torch.bool)
    bad[0, 1] = bad[2] = True
    dirty = x.clone()
    dirty[0, 1], dirty[2], dirty[~mask] = torch.nan, torch.inf, -torch.inf

    def loss(x):
        out = case.apply(case.state, x, KEY, mask, draw=True)
        return total(out), out

    slope, (value, out) = grad_and_value(loss, has_aux=True)(dirty)
    after = case.update(case.state, out.stats, threshold=1.5)
    assert all(t.isfinite().all() for t in [slope, value, out.x, *tree.leaves(out.losses), *tree.leaves(after)])
    gone = bad | ~mask
    assert not out.x[gone].any() and not slope[gone].any()
    if "hierarchical" in name:  # its rows are cells of several
        assert out.stats.lost == (bad & mask).sum()
        return
    assert (out.codes[gone] == -1).all() and (out.codes[~gone] >= 0).any()
    assert (case.encode(case.state, dirty)[gone] == -1).all()
    times = {"heads": 2, "shared": 3}.get(name, 1)  # rows count once for each
    for path, number in tree.items(out.stats):
        if path.endswith("kept"):
            assert number == times * mask.sum()
        if path.endswith("lost"):  # dropped layers lose rows too
            assert number == times * (bad & mask).sum() or (name in ("dropout", "grouped") and number == mask.sum())


def size_of(name):
    """Return the number of codes of the largest layer."""
    if name in scalar.CASES:
        return scalar.CASES[name][2]
    return max(int(t.shape[-2]) for path, t in tree.items(CASES[name].state) if path.endswith(("codes", "frozen")))


BEYOND = (
    "book",
    "heads",
    "affine",
    "a part",
    "residual",
    "implicit",
    "grouped",
    "hierarchical",
    "simvq",
    "fsq",
    "binary",
)


@pytest.mark.parametrize("name", [n if n in BEYOND else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_codes_beyond_fail_in_a_capture_and_in_a_map_too(name):
    """In a transform or a capture, the lookup itself fails; no index wraps around."""
    case, size = CASES[name], size_of(name)
    codes = case.encode(case.state, rows(name))
    decode = jit(lambda state, codes: case.decode(state, codes))
    each = vmap(lambda codes: case.decode(case.state, codes))
    assert_close(decode(case.state, codes), case.decode(case.state, codes), 0.0)
    assert_close(each(codes), case.decode(case.state, codes), 1e-6)
    for wrong in (size, size + 3, -2):
        beyond = tree.map(lambda c: torch.full_like(c, wrong), codes)  # noqa: B023
        for f in (lambda codes: decode(case.state, codes), each):
            with pytest.raises(IndexError):
                f(beyond)


@pytest.mark.parametrize("name", [*LEARN, "simvq", "residual simvq"])
def test_wrong_rows_and_codes_are_refused(name):
    case, x = CASES[name], rows(name)
    for verb in (case.encode, case.apply):
        with pytest.raises(ValueError, match=r"x(: got shape| is) \(.*\).* wanted"):
            verb(case.state, x[..., :-1])
        with pytest.raises(TypeError, match="torch.int64; wanted .*float"):
            verb(case.state, x.long())
    codes = case.encode(case.state, x)
    size = size_of(name)
    for wrong in (size, -2):
        with pytest.raises(IndexError, match=f"codes: got {wrong} for a book of {size}; wanted 0 to {size - 1}, or -1"):
            case.decode(case.state, tree.map(lambda c: torch.full_like(c, wrong), codes))  # noqa: B023
    with pytest.raises(TypeError, match="codes: got torch.float32; wanted int64"):
        case.decode(case.state, tree.map(lambda c: c.float(), codes))


MADE = [*LEARN, "simvq", "residual simvq"]  # of books; the others are compiled in test_scalar


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a_step_compiles_to_one_graph(name):
    """Compile a whole step, with dead codes: ten graph breaks in vector-quantize-pytorch."""
    case, x = CASES[name], rows(name)
    drawing, dead = ({"draw": True}, {"threshold": 1.5}) if case.learns else ({}, {})

    def step(x, key):
        def loss(x):
            out = case.apply(case.state, x, key, **drawing)
            return total(out), out

        slope, (_, out) = grad_and_value(loss, has_aux=True)(x)
        return slope, tuple(out), case.update(case.state, out.stats, **dead)

    torch._dynamo.reset()
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(x, KEY)
    assert_close(got, step(x, KEY), 1e-5)
