"""Replays of recorded steps have the bits of the function, over many steps, on a recorder that forgives nothing."""

import copy
import threading
import warnings
from functools import partial

import pytest
import torch
from torch.func import grad

from fquant import bind, jit, random, tree
from fquant.compile.cuda_graph import recordings
from tests.helpers.arrays import equal, named
from tests.helpers.cases import slow_after
from tests.helpers.graphs.recorder import use
from tests.helpers.qlora_step import copied, start, step, tokens_of

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def host(monkeypatch):
    return use(monkeypatch)


@pytest.fixture
def all_large(monkeypatch):
    """No argument is copied for its size alone."""
    monkeypatch.setattr(recordings, "SMALL", -1)


def made(f):
    """Return the recordings of the one trace of a captured function."""
    (captured,) = f.traced.values()
    return captured.recordings


# --- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", slow_after(1, [(("adapters", "state"),), (("state",),), ((),)]))
def test_steps(host, donate):
    """Every result equals jit's without recordings, when it is returned and after later replays."""
    plain, captured = jit(step, cuda_graph=False), jit(step, donate=donate, cuda_graph=True)
    adapters, state, base = start(dropout=0.3)
    ours, kept, wanted = [copied(adapters), copied(state)], [], []
    for i in range(5):
        keys = random.fold(random.fold(random.key(3), i), torch.arange(2))
        ours = captured(ours[0], ours[1], base, tokens_of(i), keys)
        adapters, state, value = plain(adapters, state, base, tokens_of(i), keys)
        assert equal(ours, (adapters, state, value))
        kept.append(ours[2])
        wanted.append(value)
    assert equal(kept, wanted) and len({float(x) for x in kept}) == 5
    assert (host.warmed, host.recorded, host.replayed, len(captured.traced)) == (1, 1, 4, 1)


def test_donated_state_stays_in_place_and_restored_state_is_followed(host):
    captured, plain = jit(step, donate=("adapters", "state"), cuda_graph=True), jit(step, cuda_graph=False)
    adapters, state, base = start()
    ours = [copied(adapters), copied(state)]
    memory = [t.data_ptr() for t in tree.leaves(ours)]
    for i in range(3):
        given = tree.leaves(ours[:2])
        ours = captured(ours[0], ours[1], base, tokens_of(i))
        assert [t.data_ptr() for t in tree.leaves(ours[:2])] == memory
        with pytest.raises(RuntimeError, match="was donated"):
            given[0].sum()
    saved = copied(ours[:2])
    for i in range(6):  # from a checkpoint again and again
        fresh = copied(saved)
        at = [t.data_ptr() for t in tree.leaves(fresh)]
        wanted, ours = plain(*copied(saved), base, tokens_of(i)), captured(*fresh, base, tokens_of(i))
        assert equal(ours, wanted) and [t.data_ptr() for t in tree.leaves(ours[:2])] == at
    assert host.recorded <= 2 + recordings.MOST_MOVES


def test_bound_weights(host):
    f = jit(lambda w, state, x: (state + w @ x, x.sum()), donate=("state",), cuda_graph=True)
    w = torch.randn(3, 3)
    run, state, wanted = bind(f, w=w), torch.zeros(3), torch.zeros(3)
    for i in range(4):
        x = X[1] + i
        at, (state, total) = state.data_ptr(), run(state=state, x=x)
        wanted = wanted + w @ x
        assert equal((state, total), (wanted, x.sum())) and state.data_ptr() == at
    assert host.replayed == 3 and host.recorded == 1


def test_the_pool_begins_with_the_peak(host):
    f = jit(lambda x: (x.exp() @ x).sum(), cuda_graph=True)
    x = torch.ones(64, 64)
    for _ in range(2):
        f(x)
    assert host.nbytes == [64 * 64 * 4 * 2]


# --- arguments --------------------------------------------------------------------------------------------------------


def test_a_new_argument_is_read(host):
    f = jit(lambda w, x: w @ x.mT, cuda_graph=True)
    w = torch.randn(4, 3)
    for i in range(5):
        x = X + i
        assert torch.equal(f(w, x), w @ x.mT)
    assert host.recorded == 1


def test_a_static_argument_is_read_where_it_is(host, all_large):
    f, w = jit(lambda w: w * 2, cuda_graph=True), torch.ones(3)
    for i in range(4):
        w.fill_(i)
        assert f(w).tolist() == [2.0 * i] * 3
    assert host.recorded == 1 and not made(f)._slots


def test_weights_that_are_exchanged_are_recorded_again(host, all_large):
    f, (a, b) = jit(lambda w: w * 2, cuda_graph=True), (torch.ones(3), torch.zeros(3))
    for w in (a, a, b, a, b, a):
        assert torch.equal(f(w), w * 2)
    assert host.recorded == 2 == len(made(f))


def test_an_argument_that_keeps_moving_is_copied(host, all_large, monkeypatch):
    monkeypatch.setattr(recordings, "LARGE", 0)
    f, weights = jit(lambda w: w * 2, cuda_graph=True), [torch.full((3,), float(i)) for i in range(9)]
    with pytest.warns(
        RuntimeWarning, match=r"jit\(<lambda>\): w \(0.00 GiB\) has another address at every call"
    ) as seen:
        for w in (weights[0], *weights):
            assert torch.equal(f(w), w * 2)
    assert len(seen) == 1 and host.recorded == 2 + recordings.MOST_MOVES


def test_recordings_that_are_kept_are_few(host, all_large, monkeypatch):
    monkeypatch.setattr(recordings, "MOST_MOVES", 99)
    f, weights = jit(lambda w: w * 2, cuda_graph=True), [torch.full((3,), float(i)) for i in range(9)]
    for w in (weights[0], *weights):
        assert torch.equal(f(w), w * 2)
    assert len(made(f)) == recordings.MOST_KEPT


def test_arguments_are_not_kept_alive(host, all_large):
    f = jit(lambda w, x: (w * 2, x + 1), donate=("w",), cuda_graph=True)
    w, x = torch.ones(3), torch.ones(2)
    for i in range(4):
        at, (w, _) = w.data_ptr(), f(w, x)
        assert w.data_ptr() == at and w.tolist() == [2.0 ** (i + 1)] * 3
    assert torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2  # the storage of x, and this call's


LAYOUTS = {
    "expanded": lambda i: torch.full((1, 3), float(i)).expand(4, 3),
    "expanded beside gaps": lambda i: torch.arange(30.0).add(i).as_strided((3, 2), (0, 10)),
    "windows": lambda i: torch.arange(6.0).add(i).unfold(0, 3, 1),
    "columns": lambda i: torch.arange(24.0).add(i).view(4, 6)[:, 1:3],
    "transposed": lambda i: torch.arange(6.0).add(i).view(2, 3).mT,
    "unaligned": lambda i: torch.arange(9.0).add(i)[1:],
    "empty": lambda i: torch.empty(0, 3),
    "scalar": lambda i: torch.tensor(float(i)),
    "bool": lambda i: torch.tensor([i % 2 == 0, True]),
    "int8": lambda i: torch.tensor([i, 2], dtype=torch.int8),
}


@named("layout", LAYOUTS)
def test_layouts(host, layout):
    """An argument of any layout is copied, and a result of it has its strides."""
    f = jit(lambda x: (x, x.mT if x.ndim == 2 else x, torch.zeros_like(x), x.float() + 1), cuda_graph=True)
    for i in range(4):
        x = LAYOUTS[layout](i)
        got, wanted = f(x), f.__wrapped__(x)
        assert equal(got, wanted) and [t.stride() for t in got] == [t.stride() for t in wanted]
    assert (host.recorded, len(f.traced)) == (1, 1)


def test_arguments_that_share_memory(host):
    f = jit(lambda a, b: a.sum() + b * 2, cuda_graph=True)
    for i in range(4):
        a = torch.arange(8.0) + i
        assert torch.equal(f(a, a[2:4]), a.sum() + a[2:4] * 2)


# --- results ----------------------------------------------------------------------------------------------------------

RESULTS = {
    "new": lambda x: x + 1,
    "an argument": lambda x: x,
    "a view of one": lambda x: (x + 1, x[1:, ::2], x.view(torch.int32)[0]),
    "one twice": lambda x: [y := x + 1, y, y[:1]],
    "a part of a new one": lambda x: (x * 2)[1:, 1:],
    "an expanded one": lambda x: (x * 2)[:1].expand(5, 3),
    "a constant": lambda x: {"zeros": torch.zeros(3), "list": torch.tensor([1.0, 2.0])},
    "none": lambda x: (1, "a"),
}


@named("kind", RESULTS)
def test_results_stay(host, kind):
    f, kept, wanted = jit(RESULTS[kind], cuda_graph=True), [], []
    for i in range(4):
        x = X + i
        kept.append(f(x))
        wanted.append(copy.deepcopy(RESULTS[kind](x)))
        for a, b in zip(tree.leaves(kept[-1]), tree.leaves(wanted[-1]), strict=True):
            assert not isinstance(a, torch.Tensor) or a.stride() == b.stride()
    assert equal(kept, wanted) if kind != "none" else kept == wanted
    if kind == "an argument":
        assert f(x) is x
    if kind == "a view of one":
        x.zero_()
        assert not kept[-1][1].any()
    if kind == "one twice":
        assert kept[-1][0] is kept[-1][1]


def test_a_view_of_donated_memory_views_the_result(host):
    f = jit(lambda a: (b := a + 1, b[1:]), donate=("a",), cuda_graph=True)
    for _ in range(4):
        a = torch.zeros(3)
        y, part = f(a)
        assert y.tolist() == [1.0] * 3 and part.data_ptr() == y.data_ptr() + 4 and part.tolist() == [1.0, 1.0]


def test_results_can_be_differentiated_and_written_after_inference(host):
    f = jit(grad(lambda x: (x**3).sum()), cuda_graph=True)
    for i, mode in enumerate((torch.inference_mode, torch.inference_mode, torch.no_grad, torch.inference_mode)):
        with mode():
            assert torch.equal(f(X + i), 3 * (X + i) ** 2)
    y = f(X)
    y.requires_grad_().square().sum().backward()
    assert torch.equal(y.grad, 6 * X**2)


# --- around it --------------------------------------------------------------------------------------------------------


def test_functions_share_the_pool(host):
    """A replay of one overwrites the results of the other in the pool, and not those that were returned."""
    f, g = jit(lambda x: x + 1, cuda_graph=True), jit(lambda x: x * 2, cuda_graph=True)
    for i in range(4):
        a, b = f(X + i), g(X + i)
        assert torch.equal(a, X + i + 1) and torch.equal(b, (X + i) * 2)
    assert host.recorded == 2


def test_threads(host):
    f, got = jit(lambda x: (x @ x).tanh().sum(), cuda_graph=True), []

    def work(k):
        for i in range(20):
            x = X.mT @ X + k + i / 7
            got.append(torch.equal(f(x), (x @ x).tanh().sum()))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [True] * 80 and host.recorded == 1


def test_a_mode_that_counts_ops_sees_them(host):
    f, seen = jit(lambda x: x.exp().sum(), cuda_graph=True), []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        f(X)
    with Count():
        assert torch.equal(f(X), X.exp().sum())
    assert "aten::exp" in seen and host.replayed == 1


# --- what cannot be recorded ------------------------------------------------------------------------------------------


def masked(x):
    y = x.clone()
    y[x > 2] = 0
    return y


def test_auto_warns_once_and_replays(host):
    f = jit(masked)
    with pytest.warns(RuntimeWarning, match=r"index_put.* in masked \(.*test_recordings.py:\d+\) has a mask") as seen:
        for i in range(3):
            assert torch.equal(f(X + i), masked(X + i))
    assert len(seen) == 1 and not host.recorded


def test_true_raises(host):
    x = X.clone()
    with pytest.raises(RuntimeError, match=r"jit\(masked\) cannot be recorded as a CUDA graph: index_put.* has a mask"):
        jit(masked, cuda_graph=True)(x)
    assert torch.equal(x, X)


def failing(host, monkeypatch):
    """Let ``exp`` fail while it is recorded, as an op that synchronises does."""
    record = host.record

    def fails(run, tensors, nbytes):
        with torch.library._scoped_library("aten", "IMPL") as library:

            def no(x):
                raise RuntimeError("operation not permitted when stream is capturing")

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                library.impl("exp", no, "CPU")
            return record(run, tensors, nbytes)

    monkeypatch.setattr(host, "record", fails)


@pytest.mark.filterwarnings("ignore:.*previously registered kernel:UserWarning")
@pytest.mark.parametrize("required", [True, "auto"])
def test_an_op_that_fails_when_recorded(host, monkeypatch, required):
    """Nothing is donated by a call that fails to record, and ``auto`` goes on without."""
    failing(host, monkeypatch)
    f = jit(lambda a: a.exp() + 1, donate=("a",), cuda_graph=required, fuse=False)
    a = f(torch.zeros(3))
    text = r"recorded as a CUDA graph: RuntimeError: exp \(aten.exp.default\) fails with RuntimeError: operation not"
    if required is True:
        with pytest.raises(RuntimeError, match=text):
            f(a)
        assert a.tolist() == [2.0] * 3
        return
    with pytest.warns(RuntimeWarning, match=text) as seen:
        b = f(a)
        c = f(b)
    assert len(seen) == 1 and torch.equal(c, (torch.full((3,), 2.0).exp() + 1).exp() + 1)


def test_bad_options():
    with pytest.raises(ValueError, match="cuda_graph is 'on'; wanted 'auto', True or False"):
        jit(lambda x: x, cuda_graph="on")
    with pytest.raises(TypeError, match=r"cuda_graph is True, and its tensors are on cpu; wanted those of CUDA"):
        jit(lambda x: x + 1, cuda_graph=True)(X)
    assert torch.equal(jit(partial(torch.add, other=1))(X), X + 1)
