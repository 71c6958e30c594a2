"""``jit(compile=...)``: torch.compile runs the captured graph, under every transform, with donation and on a mesh."""

import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad
from torch.utils.flop_counter import FlopCounterMode

import shard
from fquant import NF4_DQ, jit, tree
from models import decoder
from tests.helpers import ranks, transform_table
from tests.helpers.arrays import equal, normal
from tests.helpers.cases import slow_after
from tests.helpers.qlora_step import ALL, CFG, OPT, SOME, copied, replays, start, step, tokens_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler of C++"),
]
BACKENDS = ("aot_eager", True)  # torch's ops one by one, whose bits are those of the function, and Inductor
FAST = [("aot_eager", "linear", transform) for transform in SOME] + [(True, "linear", "vmap_all")]
ROWS = [(backend, *row) for backend in BACKENDS for row in ALL]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def close(a, b):
    """Return True if two trees differ by roundings; those of float32 count, in which a decoder computes its angles."""
    same = lambda x, y: x.dtype == y.dtype and (x - y).norm() <= 1e-6 * y.norm()
    return tree.structure(a) == tree.structure(b) and all(map(same, tree.leaves(a), tree.leaves(b)))


@pytest.mark.parametrize(
    "backend, verb, transform", slow_after(len(FAST), [*FAST, *(row for row in ROWS if row not in FAST)])
)
@pytest.mark.filterwarnings(r"ignore:jit.* reads the counts of rows on the host, because x is float64:RuntimeWarning")
def test_every_transform(backend, verb, transform):
    f = partial(transform_table.TRANSFORMS[transform], transform_table.VERBS[verb][0])
    replays(
        f, *transform_table.arguments(verb, NF4_DQ), same=equal if backend == "aot_eager" else close, compile=backend
    )


@pytest.mark.parametrize("backend", slow_after(1, BACKENDS))
def test_steps_that_donate(backend):
    captured = jit(step, compile=backend, donate=("adapters", "state"))
    adapters, state, base = start()
    ours, kept = (copied(adapters), copied(state)), copied(base)
    for i in range(3):
        given, memory = ours, [t.data_ptr() for t in tree.leaves(ours)]
        *ours, value = captured(*ours, base, tokens_of(i))
        adapters, state, wanted = step(adapters, state, base, tokens_of(i))
        assert torch.allclose(value, wanted, rtol=1e-5)
        assert backend is True or equal([*ours, value], [adapters, state, wanted])
        assert [t.data_ptr() for t in tree.leaves(ours)] == memory
        with pytest.raises(RuntimeError, match="was donated to step"):
            tree.leaves(given)[0].sum()
    assert len(captured.traced) == 1 and equal(base, kept)


# --- what a backend is not told of ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_that_are_one_tensor_at_one_call(backend):
    """Pass one tensor twice, first or later, and views of one."""
    f = jit(lambda x, y, z: (x * 2 + y, y - z), compile=backend)
    x, y, z = (normal(3, 5, seed=i) for i in range(3))
    whole = normal(7, 5)
    for given in ((x, x, z), (x, y, z), (x, y, y), (z, z, z), (whole[:3], whole[1:4], z), (x, y, z)):
        a, b, c = given
        assert close(f(*given), (a * 2 + b, b - c))
    assert len(f.traced) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_kinds_of_arguments_are_traced_again(backend):
    f = jit(grad(lambda x, k: (x.sin() * k).sum()), compile=backend, max_traces=8)
    for x in (normal(4, 6), normal(6, 4).mT, normal(4, 6, dtype=torch.float32), normal(9, 6), normal(4, 6)):
        for k in (2, 3):
            assert torch.allclose(f(x, k), x.cos() * k)
    assert len(f.traced) == 8


EXPANDED = {  # of z, in which an op replaces rows i by v; 1 and 5 with another value each
    "index_put": lambda z, i, v: z.index_put((i,), v, accumulate=True),
    "index_put once": lambda z, i, v: z.index_put((i[:2],), v[:2]),
    "index_add": lambda z, i, v: z.index_add(0, i, v),
    "index_copy": lambda z, i, v: z.index_copy(0, i[:2], v[:2]),
    "index_fill": lambda z, i, v: z.index_fill(0, i, 3),
    "scatter_add": lambda z, i, v: z.scatter_add(0, i[:, None].expand(3, 4), v),
    "select_scatter": lambda z, i, v: z.select_scatter(v[0], 0, 2),
    "slice_scatter": lambda z, i, v: z.slice_scatter(v, 0, 2, 5),
    "masked_scatter": lambda z, i, v: z.masked_scatter(torch.arange(4) < 2, v.repeat(6, 1)),
}


@pytest.mark.parametrize("replace", slow_after(2, EXPANDED.values()), ids=EXPANDED)
def test_expanded_tensors_in_which_elements_are_replaced(replace):
    """Inductor alone gives wrong values for some of these, and errors for others."""
    x, rest = normal(8, 4, seed=1), (torch.tensor([1, 5, 5]), normal(3, 4))
    f = lambda x, *rest: (replace(x.new_zeros(()).expand(8, 4), *rest) * x, replace((x[:1] + 1).expand(8, 4), *rest))
    assert close(jit(f, compile=True)(x, *rest), f(x, *rest))


def test_another_number_of_threads():
    """Inductor's code has the number of threads in it."""
    f, x = jit(lambda x: x.sin().sum(0), compile=True), normal(512, 512)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            assert torch.allclose(f(x), x.sin().sum(0))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mode_sees_every_op(backend):
    f, x = jit(lambda x: (x @ x.mT).sin(), compile=backend), normal(4, 6)
    for _ in range(3):
        with FlopCounterMode(display=False) as mode:
            got = f(x)
        assert mode.get_total_flops() == 2 * 4 * 6 * 4 and equal(got, (x @ x.mT).sin())
        assert close(f(x), (x @ x.mT).sin())
    assert len(f.traced) == 1


def test_an_op_that_fails():
    """What was donated is gone, because compiled code does not show whether it was written."""
    f = jit(lambda w, i: (w + 1, w[i]), compile="aot_eager", donate=("w",))
    w, row = f(normal(4, 3), torch.tensor([2]))
    assert row.shape == (1, 3)
    with pytest.raises(IndexError, match="out of bounds"):
        f(w, torch.tensor([9]))
    with pytest.raises(RuntimeError, match="which failed after it may have written a result there"):
        w.sum()


# --- a mesh -----------------------------------------------------------------------------------------------------------


def gradient_on_a_mesh(backend):
    """Compare a gradient through collectives with that of the function, for two values."""
    group = shard.mesh(fsdp=2).get_group("fsdp")
    norm = lambda x: shard.all_reduce(x.sin(), group).square().sum()
    f = lambda x: (grad(norm)(x), shard.all_gather(x * 2, group))
    captured = jit(f, compile=backend)
    for i in range(2):
        x = normal(4, 6, seed=10 * i + dist.get_rank())
        assert (equal if backend == "aot_eager" else close)(captured(x), f(x))
    assert len(captured.traced) == 1


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("backend", slow_after(1, BACKENDS))
def test_a_gradient_on_a_mesh(backend):
    ranks.run(2, gradient_on_a_mesh, backend, timeout=180)


def steps_on_a_mesh(backend):
    """Return the losses of three steps on adapters and a base in bundles."""
    mesh = shard.mesh(fsdp=2)
    adapters, _, base = start()
    base, adapters = shard.place((base, adapters), decoder.dims(CFG), shard.Rules(), mesh, CFG)
    base, state = shard.local(base), OPT.init(adapters)
    reduced = partial(
        step, comm=shard.comm(mesh, shard.Rules()), reduce=partial(shard.reduce, mesh=mesh, rules=shard.Rules())
    )
    captured, losses = jit(reduced, compile=backend, donate=("adapters", "state")), []
    ours = copied(adapters), copied(state)
    for i in range(3):
        *ours, value = captured(*ours, base, tokens_of(i))
        adapters, state, wanted = reduced(adapters, state, base, tokens_of(i))
        assert torch.allclose(value, wanted, rtol=1e-5)
        assert backend is True or equal([*ours, value], [adapters, state, wanted])
        losses.append(value.item())
    assert len(captured.traced) == 1
    return losses


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_on_a_mesh(backend):
    first, second = ranks.run(2, steps_on_a_mesh, backend, timeout=180)
    assert first == second and len(set(first)) == 3
