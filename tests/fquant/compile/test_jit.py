"""A captured function equals the function in every bit, and writes over donated arguments only."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from fquant import LOCAL, NF4_DQ, bind, jit, random, remat, tree
from tests.helpers import transform_table
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.formats import alike
from tests.helpers.qlora_step import ALL, SOME, X, copied, equal, replays, start, step, tokens_of

pytestmark = pytest.mark.usefixtures("twice")
# What CI takes of verbs that take seconds.
FEW = {"forward": ("grad",), "forward_remat": ("grad", "vmap_all"), "forward_remat2": ("grad_grad",)}
ROWS = [
    pytest.param(
        verb,
        transform,
        id=f"{verb}-{transform}",
        marks=[] if verb == "linear" or transform in FEW.get(verb, SOME) else pytest.mark.slow,
    )
    for verb, transform in ALL
]


@pytest.mark.each_value
@pytest.mark.filterwarnings(r"ignore:jit.* reads the counts of rows on the host, because x is float64:RuntimeWarning")
@pytest.mark.parametrize("verb, transform", ROWS)
def test_captured_is_eager(verb, transform, device):
    replays(
        partial(transform_table.TRANSFORMS[transform], transform_table.VERBS[verb][0]),
        *tree.map(lambda t: t.to(device), transform_table.arguments(verb, NF4_DQ)),
    )


REMAT, DONATED = replace(LOCAL, wrap=remat), ("adapters", "state")


@pytest.mark.parametrize(
    ("comm", "donate"), slow_after(2, [(LOCAL, DONATED), (REMAT, ()), (LOCAL, ()), (REMAT, DONATED)])
)
def test_steps(comm, donate):
    """Run several steps with dropout: new values, new keys, one trace."""
    captured = jit(step, donate=donate)
    adapters, state, base = start(dropout=0.3)
    ours, losses = [copied(adapters), copied(state)], set()
    for i in range(3):
        keys = random.fold(random.fold(random.key(3), i), torch.arange(2))
        *ours, mine = captured(ours[0], ours[1], base, tokens_of(i), keys, comm)
        adapters, state, value = step(adapters, state, base, tokens_of(i), keys, comm)
        assert equal([*ours, mine], [adapters, state, value])
        losses.add(value.item())
    for i in range(2):  # the same step with other keys
        keys = random.fold(random.key(4 + i), torch.arange(2))
        losses.add(captured(copied(ours[0]), copied(ours[1]), base, tokens_of(0), keys, comm)[2].item())
    assert len(captured.traced) == 1 and len(losses) == 5


# --- donation ---------------------------------------------------------------------------------------------------------


def test_what_is_donated_is_written_over():
    captured = jit(step, donate=("adapters", "state"))
    adapters, state, base = start()
    before = copied((adapters, state, base))
    given = tree.leaves((adapters, state))
    memory = [t.data_ptr() for t in given]
    after = captured(adapters, state, base, tokens_of(0))
    assert [t.data_ptr() for t in tree.leaves(after[:2])] == memory
    assert not {id(t) for t in tree.leaves(after)} & {id(t) for t in given}
    assert equal(after, step(before[0], before[1], before[2], tokens_of(0))) and equal(base, before[2])


def test_what_is_not_donated_is_left_alone():
    captured = jit(step, donate=("state",))
    adapters, state, base = start()
    before = copied((adapters, base))
    after = captured(adapters, state, base, tokens_of(0))
    assert equal((adapters, base), before) and not equal(after[0], adapters)


SHARED = {  # what else holds the memory of a donated tensor, beside the caller's own reference to it
    "a view that the caller keeps": lambda a: (a, a[1:]),
    "another argument": lambda a: (a, a.view_as(a)),
    "the same tensor twice": lambda a: (a, a),
    "what it is a slice of": lambda a: (a[:3], a),
}


@named("shared", SHARED)
def test_memory_that_is_shared_is_not_written(shared):
    a, other = SHARED[shared](torch.arange(4.0))
    given = torch.zeros(1) if "keeps" in shared else other
    kept, wanted = other.clone(), a * 2
    got, _ = jit(lambda a, b: (a * 2, b.sum()), donate=("a",))(a, given)
    assert torch.equal(got, wanted) and torch.equal(other, kept)


def test_donation_comes_back_when_memory_is_no_longer_shared():
    captured = jit(lambda a: a + 1, donate=("a",))
    a = torch.zeros(3)
    view, memory = a[:], a.data_ptr()
    assert captured(a).data_ptr() != memory
    assert torch.equal(a, view)  # and is not retired
    del view
    assert captured(a).data_ptr() == memory and len(captured.traced) == 2


READERS = {  # of the old value, after the result that takes its place has been made
    "itself": lambda a: a + 1,
    "a view": lambda a: a.mT + 1,
    "a view of a view": lambda a: a.mT[1:].reshape(-1)[2:] + 1,
    "a part of it": lambda a: a.unbind(0)[1] + 1,
    "two": lambda a: (a + 1) @ a.mT,
}


@named("reader", READERS)
def test_a_result_waits_for_the_last_reader(reader):
    def f(a):
        result = a * 2
        return result, READERS[reader](a).sum()

    a = torch.arange(16.0).reshape(4, 4).clone()
    memory = a.data_ptr()
    wanted, got = f(a.clone()), jit(f, donate=("a",))(a)
    assert equal(got, wanted) and got[0].data_ptr() == memory


WRITERS = {  # of the result that takes the place of the old value, once it has been made
    "a part of it": lambda y: y[:1].mul_(3),
    "itself": lambda y: y.add_(1),
    "as rows": lambda y: y.view(-1)[1:].sub_(2),
    "twice": lambda y: y.mT.add_(y[0].clone()).mul_(2),
}


@pytest.mark.parametrize("fuse", [True, False])
@named("writer", WRITERS)
def test_a_result_that_is_written_is_what_it_is_in_the_end(writer, fuse):
    def f(a):
        result = a.exp()
        seen = result[1:]
        WRITERS[writer](result)
        return result, seen * 2 + 1

    a = torch.arange(16.0).reshape(4, 4).clone() / 16
    memory = a.data_ptr()
    wanted, got = f(a.clone()), jit(f, donate=("a",), fuse=fuse)(a)
    assert equal(got, wanted) and got[0].data_ptr() == memory


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_donation_in_any_program(data):
    """Draw programs of reads, views and results; a write too early or too late would change a value."""
    size = 4
    program = data.draw(
        st.lists(st.tuples(st.sampled_from("avtsmr"), st.integers(0, 9), st.integers(0, 9)), max_size=10)
    )
    picks = data.draw(st.lists(st.integers(0, 20), min_size=4, max_size=4))

    def f(a, b):
        values = [a, b]
        for op, i, j in program:
            x, y = values[i % len(values)], values[j % len(values)]
            made = {"a": x + y, "m": x * y, "v": x.reshape(size * size).view(size, size), "t": x.mT, "s": x - x.sum()}
            values.append(made[op] if op != "r" else x[[*range(size)][::-1]])
        return (
            [values[p % len(values)] for p in picks[:2]]
            + [values[p % len(values)].sum() for p in picks[2:]]
            + [a + 1, b * 2]
        )

    draw = lambda i: random.normal(random.fold(random.key(5), i), (size, size), torch.float64)
    a, b = draw(0).clone(), draw(1).clone()  # what is a view keeps what it views, and shares its memory with it
    wanted, memory = f(a.clone(), b.clone()), {a.data_ptr(), b.data_ptr()}
    got = jit(f, donate=("a", "b"))(a, b)
    assert equal(got, wanted) and memory <= {t.untyped_storage().data_ptr() for t in got}


OTHERS = {  # two calls of f(x, k), and whether the second is traced again
    "values": ((X, 2), (X + 1, 2), False),
    "a number": ((X, 2), (X, 3), True),
    "the type of a number": ((X, 1), (X, True), True),
    "shape": ((X, 2), (X[:1], 2), True),
    "dtype": ((X, 2), (X.double(), 2), True),
    "strides": ((X, 2), (X.mT.contiguous().mT, 2), True),
    "structure": ((X, (1,)), (X, [1]), True),
    "absent": ((X, (None,)), (X, (2,)), True),
    "the sign of zero": ((X, 0.0), (X, -0.0), True),
    "another nan": ((X, float("nan")), (X, float("nan")), False),
}


@pytest.mark.parametrize("first, second, again", OTHERS.values(), ids=OTHERS)
def test_what_is_traced_again(first, second, again):
    def f(x, k):
        numbers = [n for n in tree.leaves(k) if n is not None]
        return {"y": x * sum(numbers), "k": k, "types": str([type(n) for n in numbers])}

    captured = jit(f)
    for args in (first, second, first):
        got, wanted = captured(*args), f(*args)
        assert alike(got.pop("y"), wanted.pop("y")) and repr(got) == repr(wanted)
    assert len(captured.traced) == 1 + again


def test_calls_by_position_and_by_name_are_one():
    captured = jit(lambda x, k=2, *rest, z=1, **more: x * k + z + sum(rest) + sum(more.values()))
    assert torch.equal(captured(X, 3, z=4), X * 3 + 4) and torch.equal(captured(k=3, z=4, x=X), X * 3 + 4)
    assert len(captured.traced) == 1
    assert torch.equal(captured(X, 3, 4, 5, z=6, w=7), X * 3 + 22)


def test_one_function_of_many_options():
    @jit
    def plain(x):
        return x + 1

    @jit(max_traces=1)
    def once(x):
        return x + 1

    assert torch.equal(plain(X), once(X)) and plain.__name__ == "plain"
    with pytest.raises(
        RuntimeError,
        match=r"jit\(once\) would be traced more than 1 times: x is float32\[1, 3\] .* and was float32\[2, 3\]",
    ):
        once(X[:1])


# --- inside and around ------------------------------------------------------------------------------------------------


def test_inside_of_transforms_and_captures_it_is_the_function_itself():
    inner = jit(lambda x: (x**3).sum())
    assert torch.equal(grad(inner)(X), 3 * X**2)
    assert torch.equal(vmap(inner)(X), (X**3).sum(1))
    assert torch.equal(jit(grad(inner))(X), 3 * X**2)
    assert inner.traced == {}


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning", "ignore:Anomaly Detection has been:UserWarning")
def test_anomalies_are_found_in_the_function_itself():
    captured = jit(grad(lambda x: (x * 0).sqrt().mul(0).sum()))
    assert captured(X).isnan().all()
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="SqrtBackward0.* returned nan"):
        captured(X)


def test_who_counts_ops_sees_a_replay_and_no_trace():
    captured, seen = jit(lambda x: x.exp().sum()), []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Count():
        captured(X)
        captured(X)
    assert seen == ["aten::exp", "aten::sum"] * 2


@named("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_results_do_not_depend_on_the_mode(mode):
    captured = jit(grad(lambda x: (x**3).sum()))
    with mode():
        assert torch.equal(captured(X), 3 * X**2) and not captured(X).requires_grad


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_trace_one_at_a_time():
    """Call functions from four threads: torch's tracer serves one, while others would trace and replay."""
    bodies = [lambda x, k=k: (x @ x * k).tanh().sum(0) + (x * k).exp() for k in range(6)]
    functions, wanted = [jit(f) for f in bodies], [f(X.mT @ X) for f in bodies]
    start, got = threading.Barrier(4), []

    def work(turn):
        start.wait(60)
        for i in range(12):
            which = (i + turn) % len(bodies)
            got.append(torch.equal(functions[which](X.mT @ X), wanted[which]))

    threads = [threading.Thread(target=work, args=(turn,)) for turn in (0, 0, 1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == [True] * 48 and [len(f.traced) for f in functions] == [1] * len(bodies)


def test_bind_fixes_arguments():
    """A bound function has the results, the traces and the donation of the whole call."""
    calls = jit(lambda w, x, scale=2.0: (x * scale + w["a"][0], x.sum()), donate=("x",))
    w = {"a": [torch.ones(3)]}
    bound = bind(calls, w=w, scale=3.0)
    for _ in range(3):
        x = torch.arange(3.0)
        before = x.data_ptr()
        y, total = bound(x=x)
        assert y.tolist() == [1.0, 4.0, 7.0] and total == 3 and y.data_ptr() == before
        with pytest.raises(RuntimeError, match="was donated"):
            x.sum()
    assert len(calls.traced) == 1  # type: ignore[attr-defined]
    assert bound(x=torch.arange(4.0)[:3].double())[0].tolist() == [1.0, 4.0, 7.0]
    shared = bind(calls, w={"a": [torch.ones(3)]}, scale=3.0)
    own = torch.arange(3.0)
    assert bind(calls, w={"a": [own]}, scale=1.0)(x=own)[0].tolist() == [0.0, 2.0, 4.0] and own.sum() == 3
    assert torch.func.vmap(lambda x: shared(x=x)[0])(torch.zeros(2, 3)).tolist() == [[1.0] * 3] * 2
    plain = bind(lambda w, x: w + x, w=1)
    assert plain(x=2) == 3
    with pytest.raises(ValueError, match=r"bind\(.*\): cannot fix x, y; wanted some of w, scale"):
        bind(calls, x=own, y=1)
