"""Memory plans: replays in planned memory have the same bits, need hardly any other, and share it safely."""

import threading
from functools import partial

import pytest
import torch
from torch.profiler import profile

from fquant import cost, jit, tree
from fquant.compile import graph
from fquant.compile.memory import allocator
from fquant.kernels import dispatch
from tests.bench.timing import extra_bytes
from tests.helpers import ranks
from tests.helpers.arrays import randn
from tests.helpers.qlora_step import copied, equal, start, step, tokens_of

pytestmark = pytest.mark.usefixtures("twice")


def placed(f):
    """Return the memory plan of the one trace of a captured function."""
    (captured,) = f.traced.values()
    return captured.placed


def test_a_step_takes_what_its_graph_says_and_hardly_more(monkeypatch):
    adapters, state, base = start()
    predicted = cost(step, adapters, state, base, tokens_of(0), donate=("adapters", "state"))
    taken = dict[str, int]()
    for setting in ("reuse", "system"):
        monkeypatch.setenv(allocator.VARIABLE, setting)
        f = jit(step, donate=("adapters", "state"))
        adapters, state, _ = f(adapters, state, base, tokens_of(0))
        laid_out = placed(f).nbytes if placed(f) else 0
        donated = copied((adapters, state))
        taken[setting] = laid_out + extra_bytes(partial(f, *donated, base, tokens_of(0)))
        if laid_out:
            assert 0.9 < laid_out / (predicted.peak - predicted.arguments) < 1.05
    assert taken["reuse"] < 1.1 * taken["system"]  # with the temporary memory of ops


def test_ours_are_called_without_torch_unless_a_profiler_is_there():
    given, f = (*start(), tokens_of(0)), jit(step)
    wanted = f(*given)
    ops = [node.target for node in placed(f).module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert ops and not [op for op in ops if op.name() in dispatch.DIRECT]
    with profile(acc_events=True) as seen:
        got = f(*given)
    assert equal(got, wanted)
    assert {"fquant::pointwise", "fquant::matmul", "fquant::rms_norm"} <= {one.key for one in seen.key_averages()}


def test_a_result_that_is_returned_is_read_by_a_prepared_call():
    """One result of a program is allocated for the caller, another is planned, and a later program reads both."""

    def f(x):
        a = x * 2 + 1
        total = (a * a).sum(-1, keepdim=True)
        return a, a * total - total * 3

    x, captured = randn(8, 8), jit(f)
    assert equal(captured(x), f(x))
    module = placed(captured).module
    ours = [n for n in module.graph.nodes if "pointwise" in str(getattr(n.target, "__name__", ""))]
    read = [argument for node in ours for argument in node.all_input_nodes if argument.op == "call_function"]
    assert len(ours) >= 2 and read and all("val" in argument.meta for argument in read)
    assert equal(captured(x + 1), f(x + 1))


def test_what_is_returned_is_the_caller_s():
    @jit
    def f(x, w):
        y = x @ w
        return {"y": y, "view": y.mT[1:], "argument": x, "sum": y + 1, "more": ((y @ w) * 2).neg() @ w}

    x, w = randn(8, 8), randn(8, 8, seed=1)
    first = f(x, w)
    before, names = copied(first), placed(f).tensors
    assert names and f(x + 1, w)["y"].data_ptr() != first["y"].data_ptr()
    assert equal(first, before) and equal(first, f.__wrapped__(x, w))


def test_constants_of_a_trace_are_no_places():
    """Replay constant tensors, some only viewed, beside planned results."""

    def f(x):
        scale, shift = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 0.25])
        return ((x @ x) * scale.mT @ x + shift.view(2, 1)).sum(), shift[None]

    captured = jit(f)
    for i in range(1, 4):
        x = randn(2, 2, seed=i)
        assert equal(captured(x), f(x)) and placed(captured).tensors


def chain(x):
    for _ in range(4):
        x = (x @ x.mT).sqrt().neg().exp()
    return x.sum()


def test_functions_share_the_memory():
    small, large = jit(chain), jit(chain)
    x, more = randn(16, 16).abs(), randn(512, 512).abs()
    one = small(x)
    allocator.acquire(0)
    for _ in range(2):
        assert torch.equal(large(more), chain(more)) and torch.equal(small(x), one)
    assert placed(small).memory is placed(large).memory is allocator.acquire(0)
    allocator.release()
    assert torch.equal(small(x), one) and torch.equal(large(more), chain(more))


def test_a_second_thread_does_without():
    f, x = jit(chain), randn(16, 16).abs()
    want, got, names = f(x), [], set(placed(f).tensors)
    assert torch.equal(f(x), want)
    before = placed(f).memory
    placed(f).memory = None  # a replay in the memory would bind its tensors again
    with allocator.IN_USE:
        thread = threading.Thread(target=lambda: got.append(f(x)))
        thread.start()
        thread.join(60)
    assert torch.equal(got[0], want) and placed(f).memory is None and names
    assert torch.equal(f(x), want) and placed(f).memory is before


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode(first):
    f, x = jit(chain), randn(16, 16).abs()
    for mode in (first, not first, first):
        with torch.inference_mode(mode):
            assert torch.equal(f(x), chain(x))


def test_an_error_leaves_the_memory_to_the_next():
    from fquant.kernels.ops.nll import nll

    f = jit(lambda x, targets: nll((x @ x.mT).sqrt(), targets, -100).sum())
    x, good = randn(8, 8).abs(), torch.arange(8)
    want = f(x, good)
    with pytest.raises(IndexError, match="target 9 in row 0"):
        f(x, good + 9)
    assert not allocator.IN_USE.locked() and torch.equal(f(x, good), want)


def test_only_what_is_known_to_be_a_view_is_made_once():
    def strange(g: graph.Graph):
        """Insert an op on a planned result, without a fake value."""
        (node,) = (n for n in g.nodes if n.target is torch.ops.aten.sqrt.default)
        with g.inserting_after(node):
            new = g.call_function(torch.ops.aten.exp.default, (node,))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    f = jit(lambda x: (x @ x).sqrt().sum(), passes=(strange,), fuse=False, recompute=False)
    for x in (torch.ones(4, 4), torch.full((4, 4), 2.0)):
        assert torch.equal(f(x), (x @ x).sqrt().exp().sum())


def test_who_does_without(monkeypatch):
    x = randn(16, 16).abs()
    compiled = jit(chain, compile="eager")
    compiled(x)
    assert placed(compiled) is None
    nothing = jit(lambda x: x.roll(1).flip(0))
    assert torch.equal(nothing(x), x.roll(1).flip(0)) and placed(nothing) is None
    monkeypatch.setenv(allocator.VARIABLE, "system")
    plain = jit(chain)
    assert torch.equal(plain(x), chain(x)) and placed(plain) is None


def _sends():
    import shard

    mesh = shard.mesh(fsdp=2)
    group = mesh.get_group("fsdp")
    torch.manual_seed(torch.distributed.get_rank())
    x = torch.rand(64, 8)

    def f(x):
        sent = (x @ x.mT).sqrt()
        got = shard.all_gather(sent, group)
        return ((got @ sent).sqrt() @ shard.all_reduce(sent, group)).sum()

    captured = jit(f)
    assert all(torch.equal(captured(x * i), f(x * i)) for i in range(1, 4))
    (trace,) = captured.traced.values()
    g = trace.module.graph
    flying = [
        node for node in g.nodes if node.op == "call_function" and (graph.collective(node) or graph.is_wait(node))
    ]
    names = {name.partition("_at_")[0] for name in trace.placed.tensors}
    near = {n.name for node in flying for n in (node, *graph.read_nodes(node)) if n.op == "call_function"}
    return sorted(near), sorted(names & near), len(names)


@pytest.mark.xdist_group("ranks")
def test_what_travels_is_not_placed():
    for flying, shared, count in ranks.run(2, _sends):
        assert flying and not shared and count


def _sums():
    """Return for each way to use an addend whether its sum over ranks is written over it."""
    import shard

    group = shard.mesh(dp=2).get_group("dp")
    add = lambda x: shard.all_reduce(x, group)
    issue = lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)
    wait = torch.ops._c10d_functional.wait_tensor

    def flying(y):
        got = torch.ops.fquant.all_gather(y, 2, group.group_name)
        return wait(issue(y)), wait(got)

    ways = {
        "made": lambda y: add(y * 2),
        "read before": lambda y: (z := y * 2, z @ z, add(z))[1:],
        "view": lambda y: add((y * 2).view(-1)),
        "gathered": lambda y: add(shard.all_gather(y * 2, group)),
        "sum": lambda y: add(add(y)),
        "read after": lambda y: (z := y * 2, add(z) @ z)[1],
        "read in flight": lambda y: (z := y * 2, out := issue(z), s := z @ z, wait(out) @ s)[-1],
        "sent by another": lambda y: flying(y * 2),
        "returned": lambda y: (z := y * 2, add(z)),
        "part": lambda y: add((y * 2)[:4]),
        "expanded": lambda y: wait(issue((y * 2).sum(0).expand(8, 8))),
        "turned": lambda y: add((y * 2).mT),
        "given": add,
    }
    draw = lambda: torch.rand(8, 8, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    found = {}
    for name, f in ways.items():
        planned = lambda x, name=name, f=f: (f(x if name == "given" else x @ x), (x @ x).sqrt().sum())
        captured = jit(planned)
        for _ in range(3):
            got, want = captured(x := draw()), planned(draw())
            assert all(map(torch.equal, tree.leaves(got), tree.leaves(want))), name
            assert torch.equal(x, draw()), name
        ops = [str(node.target) for node in placed(captured).module.graph.nodes]
        found[name] = sum("all_reduce_." in op for op in ops), sum("all_reduce" in op for op in ops)
        assert not any("lent" in op for op in ops), name
    return found


@pytest.mark.xdist_group("ranks")
def test_a_sum_over_ranks_is_written_over_what_nothing_else_reads():
    once, never = (1, 1), (0, 1)
    wanted = {name: once for name in ("made", "read before", "view", "gathered", "turned")}
    wanted |= {name: never for name in ("read after", "read in flight", "sent by another", "returned", "part")}
    wanted |= {"sum": (2, 2), "expanded": never, "given": never}
    assert ranks.run(2, _sums) == [wanted] * 2
