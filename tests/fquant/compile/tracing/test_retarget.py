"""A function traced for CUDA has the values that it has on the host, and nothing in its graph is left on the host."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap

from fquant import LOCAL, NF4_DQ, cost, jit, random, remat, scan
from fquant.compile import graph as graphs
from fquant.compile.trace import trace
from fquant.compile.tracing.retarget import device_of, with_index
from tests.helpers import transform_table
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.graphs.retargeted import CUDA, HOST, devices, on_fakes, on_host, traced
from tests.helpers.qlora_step import ALL, SOME, equal, start, step, tokens_of

FEW = {"forward": ("grad",), "forward_remat": ("grad",), "forward_remat2": ()}  # of those that take seconds
ROWS = [
    pytest.param(verb, transform, id=f"{verb}-{transform}", marks=[] if quick else pytest.mark.slow)
    for verb, transform in ALL
    for quick in [transform in FEW.get(verb, SOME)]
]
X = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))


def holds(f, *args, **options):
    """Check that ``f`` traced for CUDA runs on fake tensors there, and computes on the host what ``f`` does."""
    captured = traced(f, *args, **options)
    on_fakes(captured.module)
    assert devices(captured.module.graph) == {CUDA} == {captured.device}
    assert equal(on_host(captured, *args), f(*args))
    return captured


@pytest.mark.each_value
@pytest.mark.parametrize("verb, transform", ROWS)
def test_the_graph_computes_what_the_function_does(verb, transform):
    f = partial(transform_table.TRANSFORMS[transform], transform_table.VERBS[verb][0])
    holds(f, *transform_table.arguments(verb, NF4_DQ))


@pytest.mark.parametrize("comm", slow_after(1, [LOCAL, replace(LOCAL, wrap=remat)]))
def test_a_step(comm):
    adapters, state, base = start(dropout=0.3)
    holds(partial(step, comm=comm), adapters, state, base, tokens_of(0), random.fold(random.key(3), torch.arange(2)))


CONSTANTS = {
    "a number": lambda x: x * torch.tensor(0.1),
    "a number there": lambda x: x * torch.tensor(0.1, device=x.device, dtype=torch.float64),
    "a chain of numbers": lambda x: x / (torch.tensor(3.0).sqrt() + torch.full((), 2.0)),
    "a list": lambda x: x + torch.tensor([1.0, 2, 3, 4, 5, 6], device=x.device),
    "a new tensor": lambda x: x + x.new_tensor([1.0, 2, 3, 4, 5, 6]),
    "indices": lambda x: x[torch.as_tensor([5, 0], device=x.device)],
    "a range": lambda x: x[:, torch.arange(3, device=x.device)],
    "like another": lambda x: torch.zeros_like(x) + torch.ones(6, device=x.device) + x.new_full((6,), 2),
    "by the name of the device": lambda x: x + torch.ones(6, device=x.device).to(x.device),
}


@named("name", CONSTANTS)
def test_constants_are_made_by_the_device(name):
    holds(CONSTANTS[name], X)


BLOCKS = {  # Functions, which torch calls outside of the modes of a trace
    "scan": lambda f, x, ws: scan(lambda x, w: (f(x, w), ()), x, ws)[0],
    "remat": lambda f, x, ws: remat(f)(remat(f)(x, ws[0]), ws[1]),
    "mapped": lambda f, x, ws: vmap(lambda x: scan(lambda x, w: (f(x, w), ()), x[None], ws)[0])(x),
}


@named("name", CONSTANTS)
@named("block", BLOCKS)
def test_constants_of_a_block_that_is_differentiated(block, name):
    f = lambda x, w: x + CONSTANTS[name]((x @ w).expand(6, 6)).float().sum()
    holds(grad(lambda ws, x: BLOCKS[block](f, x, ws).square().sum()), torch.stack([X, X.mT]), X)


def test_a_constant_is_copied_to_the_device_once():
    graph = traced(CONSTANTS["a list"], X).module.graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == [
        "aten.lift_fresh_copy.default",
        "aten.add.Tensor",
    ]


def test_a_device_that_the_function_names():
    """A function on a card may name it."""
    captured = traced(lambda x: (x.to("cuda:0") + torch.zeros(6, device="cuda")) @ x, X)
    on_fakes(captured.module)
    assert equal(on_host(captured, X), X @ X)


FUNCTIONS = {
    "views": lambda x: (x.mT[:5] + 1).reshape(-1)[::2].sum(),
    "an argument returned": lambda x: {"same": x, "view": x[:3], "new": x + 1},
    "in place": lambda x: x.clone().mul_(2).t_().add_(x),
    "second order": grad(lambda x: grad(lambda y: (y @ y).tanh().sum())(x).square().sum()),
    "forward mode": lambda x: jvp(lambda y: (y @ y).tanh().sum(0), (x,), (x,)),
    "sort": lambda x: torch.sort(x).indices[0] + torch.topk(x, 2).values.sum(),
}


@named("name", FUNCTIONS)
def test_functions(name):
    holds(FUNCTIONS[name], X)


def test_arguments_that_share_memory_share_it_in_the_graph():
    base = torch.randn(40)
    args = base, base[8:16].view(2, 4), base.view(torch.uint8)[3:9], torch.randn(3)
    captured = traced(lambda *each: [t + 1 for t in each], *args)
    given = captured.module.graph.find_nodes(op="placeholder")
    assert graphs.storages(given[0]) == graphs.storages(given[1]) == graphs.storages(given[2])
    assert not graphs.storages(given[0]) & graphs.storages(given[3])
    found = [(t.shape, t.stride(), t.dtype, t.storage_offset()) for node in given for t in graphs.tensors(node)]
    assert found == [(t.shape, t.stride(), t.dtype, t.storage_offset()) for t in args]


def test_donation_and_host_arguments():
    """A host argument stays there, for a pass or the function to bring it to the device."""
    x, packed = torch.randn(8, 8), torch.randn(8, 8)
    f = lambda args: args["x"] + args["far"].to(args["x"].device)
    captured = trace(f, {"x": x, "far": packed}, donate=(id(x),), device=CUDA, host=(id(packed),))
    (near, far), graph = captured.module.graph.find_nodes(op="placeholder"), captured.module.graph
    assert (near.meta["val"].device, far.meta["val"].device) == (CUDA, HOST)
    assert devices(graph) == {CUDA, HOST} and dict(captured.donations) == {
        0: "x was donated to a captured function(...)"
    }
    on_fakes(captured.module)


def test_the_cost_on_another_device_is_that_of_its_graph():
    adapters, state, base = start()
    args = adapters, state, base, tokens_of(0).clone()  # not part of another
    there = cost(step, *args, device="cuda", donate=("adapters", "state"))
    here = cost(step, *args, fuse=False, donate=("adapters", "state"))
    assert (there.arguments, there.flops) == (here.arguments, here.flops) and there.peak
    meta = [torch.empty_like(t, device="meta") for t in (X, X)]
    assert cost(torch.mm, *meta, device="cuda:1") == cost(torch.mm, *meta, device="cpu")


def tensor_on(device, pinned=False) -> Any:
    """What :func:`device_of` reads of a tensor."""
    return SimpleNamespace(device=torch.device(device), is_pinned=lambda: pinned)


def test_the_device_of_arguments():
    here, there, pinned = tensor_on("cpu"), tensor_on("cuda:1"), tensor_on("cpu", pinned=True)
    assert device_of([]) == (HOST, set()) == device_of([("x", here), ("y", pinned)])
    assert device_of([("x", pinned), ("y", there)]) == (there.device, {id(pinned)})
    fix = re.escape("a.w is on cpu, and b on cuda:1; wanted one device: move it with a.w.to('cuda:1')")
    with pytest.raises(TypeError, match=fix):
        device_of([("a.w", here), ("b", there)])
    with pytest.raises(TypeError, match="c is on cuda:0, and b on cuda:1"):
        device_of([("b", there), ("c", tensor_on("cuda:0"))])


def test_mixed_devices_raise_before_anything_runs():
    with pytest.raises(TypeError, match="y is on meta|x is on cpu, and y on meta"):
        jit(lambda x, y: x + y)(X, X.to("meta"))


def test_a_device_without_a_number_is_the_current_one():
    assert with_index(torch.device("cuda")).index is not None
    assert [with_index(torch.device(each)) for each in ("cpu", "cuda:3")] == [HOST, torch.device("cuda:3")]


def test_errors():
    with pytest.raises(TypeError, match=r"<lambda> .* uses a tensor on the host beside those on cuda:0; make it there"):
        traced(lambda x: x + torch.arange(6), X)
    with pytest.raises(TypeError, match="asks for the value of a tensor"):
        traced(lambda x: x * x.sum().item(), X)
    with pytest.raises(TypeError, match="uses a tensor that is no argument"):
        traced(lambda x: x + X, X)


def enter_autocast(x, w):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        return torch.matmul(x, w)


@named("block", ["alone", *BLOCKS])
def test_autocast_is_refused(block):
    run = BLOCKS.get(block, lambda f, x, ws: f(x, ws[0]))
    with pytest.raises(TypeError, match="autocast is on for cuda"):
        traced(grad(lambda ws, x: run(enter_autocast, x, ws).sum()), torch.stack([X, X.mT]), X)
