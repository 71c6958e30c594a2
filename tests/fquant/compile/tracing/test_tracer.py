"""The tracer: the graphs of torch's own tracer, for programs, in-place ops, constants and known numbers."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import jit, tree
from fquant.compile import graph
from fquant.compile.tracing.fake_tensor import Fake
from fquant.compile.tracing.tracer import is_traced, record
from tests.bench.programs.catalogue import PROGRAMS
from tests.helpers.arrays import randn


def both(fn, args):
    """Return the graphs of a function of trees, ours and that of ``make_fx``."""
    leaves, structure = tree.flatten(args)

    def flat(*tensors):
        out = fn(*tree.unflatten(structure, tensors))
        return [t for t in tree.leaves(out) if isinstance(t, Tensor)]

    def fakes():
        mode = Fake()
        return mode, [mode.from_tensor(t) for t in leaves]

    mode, given = fakes()
    ours = record(flat, given, mode)
    mode, given = fakes()
    with mode:
        return ours.graph, make_fx(flat)(*given).graph


def described(g):
    """Return the nodes of a graph with their arguments by place and their layouts, less what nothing reads."""
    kept = [node for node in g.nodes if node.users or node.op in ("placeholder", "output") or _writes(node)]
    place = {node: i for i, node in enumerate(kept)}
    number = lambda x: torch.fx.node.map_arg(x, lambda node: place[node])
    layouts = lambda node: [graph.tensor_layout(t) for t in graph.tensors(node)]
    name = lambda node: "" if node.op in ("placeholder", "get_attr") else str(node.target)
    return [(node.op, name(node), str(number((node.args, node.kwargs))), layouts(node)) for node in kept]


def _writes(node):
    return node.op == "call_function" and bool(graph.written_storages(node))


def in_place(x):
    y = x * 2
    y[0] = 3.0
    y.t().add_(1).mul_(x.mT)
    z = torch.zeros(3)
    z.index_add_(0, torch.tensor([0, 2]), x[0, :2])
    return y, z.unsqueeze_(0)


def numbers(x):
    scale = torch.tensor(3.0) * 2
    rest = torch.tensor([1.0, 2.0, 4.0])
    count = torch.tensor(2)
    count.add_(1)
    return x * float(scale) + rest[: int(count)].sum(), torch.full((count.item(),), 1.5)


def several(x):
    values, at = x.max(dim=1)
    first, second = x.split(1, dim=1)[:2]
    mean, variance = torch.var_mean(x, dim=0)
    return values, at, first @ second.mT, torch.sort(mean / variance).indices, torch.linalg.qr(x @ x.mT)


def derivatives(x):
    f = lambda v: (v.tanh() * v.relu()).sum() - v.log_softmax(-1)[1]
    return vmap(grad(f))(x), torch.func.hessian(f)(x[0]), torch.func.jvp(lambda v: v.softmax(-1), (x,), (x,))


def unused(x):
    x.sin()
    return x.cos()


FUNCTIONS = {f.__name__: f for f in (in_place, numbers, several, derivatives, unused)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_is_that_of_torch(name):
    x = randn(4, 3)
    ours, theirs = both(FUNCTIONS[name], (x,))
    assert described(ours) == described(theirs)
    found = tree.leaves(jit(FUNCTIONS[name])(x))
    assert all(torch.equal(a, b) for a, b in zip(found, tree.leaves(FUNCTIONS[name](x)), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_graph_of_a_program_is_that_of_torch(name):
    torch.manual_seed(0)
    ours, theirs = map(described, both(*PROGRAMS[name].make(4)))
    assert ours == theirs


def test_autocast_casts_once_as_uncaptured():
    """Gradients of a weight that is used twice add up in bfloat16, because both uses read one cast of it."""

    def f(w, x):
        return (torch.tanh(x @ w) @ w).square().sum()

    x, w = randn(6, 6), randn(6, 6, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, found = grad(f)(w, x), jit(grad(f))(w, x)
    assert torch.equal(found, wanted)


def test_whether_a_function_is_traced():
    seen = []
    jit(lambda x: seen.append(is_traced()) or x + 1)(randn(2))
    make_fx(lambda x: seen.append(is_traced()) or x + 1)(randn(2))
    assert seen == [True, True] and not is_traced()


def test_an_error_ends_the_trace():
    def wrong(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jit(wrong)(randn(2))
    assert not is_traced() and torch._C._len_torch_dispatch_stack() == 0
