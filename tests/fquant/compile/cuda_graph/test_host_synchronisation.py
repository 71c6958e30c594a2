"""Nodes that a CUDA graph cannot record are found in the graph, and a training step has none."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.func import grad
from torch.testing._internal.distributed.fake_pg import FakeStore

from fquant import grouped_linear, quantize, tree
from fquant.compile.cuda_graph import describe, host_synchronisation, synchronises
from fquant.compile.trace import trace
from fquant.format import AQ_2X8, NF4, NF4_DQ
from fquant.kernels.dispatch import runs_programs
from shard.transport.gloo import all_gather
from shard.transport.host import arrived, fetch, stash
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.graphs import bf16_step, llama_step
from tests.helpers.graphs.retargeted import CUDA, traced
from tests.helpers.qlora_step import start, step, tokens_of

X = torch.arange(12.0).reshape(3, 4)


def put(x, values=0.0):
    y = x.clone()
    y[x > 2] = values
    return y


def gathered(x):
    return torch.ops._c10d_functional.wait_tensor(all_gather(x, 1, dist.group.WORLD.group_name))


WAITING = {  # and a part of what is said of it
    "a mask as an index": (put, r"index_put_ \(aten.index_put_.default\) in put \(.*\.py:\d+\) has a mask"),
    "draws of a distribution": (lambda x: torch.multinomial(x, 2), "multinomial .* needs a value on the host"),
    "eigenvalues": (lambda x: torch.linalg.eigh(x[:, :3] @ x[:, :3].mT), "needs a value on the host"),
    "a copy to the host": (lambda x: x.cpu() if x.device.type == "meta" else x, "copies between|returns"),
    "experts": (
        lambda x: grouped_linear(x, torch.zeros(2, 5, 4, device=x.device), torch.tensor([1, 2], device=x.device)),
        r"fquant.grouped_mm.default\) .*reads the counts of rows on the host",
    ),
}


@named("name", WAITING)
def test_what_waits_is_found(name):
    f, text = WAITING[name]
    captured = traced(f, X, lines=True)
    found = [describe(node) for node in synchronises(captured.module.graph)]
    assert found and any(re.search(text, one) for one in found), found


RECORDED = {
    "indices": lambda x: x[torch.tensor([0, 2], device=x.device)],
    "a mask that selects": lambda x: torch.where(x > 2, x, 0),
    "a mask that fills": lambda x: x.masked_fill(x > 2, 1.0),
    "views": lambda x: x.mT.reshape(2, 6)[1:],
    "draws": lambda x: torch.nn.functional.dropout(x),
    "sort": lambda x: x.sort().values.cumsum(0),
    "a copy to the host that comes back": lambda x: arrived(fetch(arrived(stash(x)), CUDA)) + 1,
}


@named("name", RECORDED)
def test_what_does_not_wait_is_not(name):
    assert not synchronises(traced(RECORDED[name], X).module.graph)


def test_host_arguments():
    """A transfer brings an argument of the host; to compute with it there would freeze its value."""
    x, far = torch.randn(8), torch.randn(8)
    bring = lambda args: args["x"] + arrived(fetch(args["far"].view(2, 4).view(8), CUDA))
    for f, texts in (
        (bring, []),
        (lambda args: args["x"] + args["far"].to(args["x"].device), ["copies between the host and the device"]),
        (lambda args: (args["x"] + 1, args["far"] * 2), ["computes on the host", "returns mul on the host"]),
        (lambda args: args["x"] * args["far"][0], ["copies between the host and the device"]),
    ):
        graph = trace(f, {"x": x, "far": far}, device=CUDA, host=(id(far),)).module.graph
        found = [describe(node) for node in synchronises(graph)]
        assert len(found) == len(texts) and all(text in one for text, one in zip(texts, found, strict=True)), found


def test_collectives_that_send_from_the_host(monkeypatch):
    """Gloo's collectives are recorded by no graph; those of NCCL are, for which torch's fake backend stands."""
    summed = lambda x: torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert not synchronises(traced(summed, X).module.graph)
        (node,) = synchronises(traced(gathered, X).module.graph)
        assert "communicates over gloo, which sends from the host; use a mesh of NCCL" in describe(node)
        monkeypatch.setattr(host_synchronisation, "_backend", lambda node: "nccl")
        assert not synchronises(traced(summed, X).module.graph)
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
        (node,) = synchronises(traced(summed, X).module.graph)
        assert "is waited for on the host, because TORCH_NCCL_BLOCKING_WAIT is set; unset it" in describe(node)
    finally:
        dist.destroy_process_group()


def test_on_the_host_nothing_is_far():
    graph = trace(lambda args: args[0].cpu() + 1, (X,)).module.graph
    assert not synchronises(graph)


@pytest.mark.parametrize("checkpoint", slow_after(1, ["selective", "full"]))
def test_a_step_never_waits(checkpoint):
    """The step of Llama-3-8B in few layers, on a mesh that gathers, has no node for which the host waits."""
    with llama_step.captured(1, checkpoint, fsdp=2) as captured:
        assert captured.collectives and not synchronises(captured.module.graph)


EXPERTS = {  # stacks of two matrices, the dtype of x, and why the host reads the counts
    "packed": (NF4_DQ, 64, torch.bfloat16, None),
    "an array each": (replace(NF4, flat=True), 64, torch.float16, None),
    "float32": (NF4, 64, torch.float32, "because x is float32; use bfloat16 or float16"),
    "vectors": (AQ_2X8, 64, torch.bfloat16, "because aq_2x8 has learned vectors"),
    "half a word": (NF4, 36, torch.bfloat16, "because packed rows of 18 bytes are not whole 32-bit words"),
    "straddling": (replace(NF4, flat=True), 72, torch.bfloat16, "because blocks of nf4 straddle rows of 72"),
}


@named("name", EXPERTS)
def test_grouped_products_wait_for_what_has_no_kernel(name):
    format, width, dtype, reason = EXPERTS[name]
    w = tree.map(lambda *t: torch.stack(t), *[quantize(torch.randn(16, width), format) for _ in range(2)])
    x = torch.randn(3, width, dtype=dtype)
    f = lambda x, w, counts: grad(lambda x: grouped_linear(x, w, counts).float().sum())(x)
    graph = traced(f, x, w, torch.tensor([1, 2])).module.graph
    if not runs_programs("cuda"):
        reason = "without Triton; pip install triton"
    assert any("grouped_matmul" in str(node.target) for node in graph.nodes)
    found = [describe(node) for node in synchronises(graph)]
    assert bool(found) == (reason is not None) and all(reason in one for one in found)


@pytest.mark.skipif(not runs_programs("cuda"), reason="Triton is not installed")
def test_a_step_of_experts_never_waits():
    cfg = replace(bf16_step.CFG, family="mixtral", num_experts=4, experts_per_token=2, routing="renormalised_wide")
    for of in (torch.bfloat16, torch.float32):
        step = lambda *args, of=of: bf16_step.step(*args, cfg, of)
        graph = traced(step, *bf16_step.start(cfg, of)).module.graph
        assert sum("grouped_matmul" in str(node.target) for node in graph.nodes) >= 4
        assert bool(synchronises(graph)) == (of is torch.float32)


def test_a_small_step_never_waits():
    assert not synchronises(traced(step, *start(), tokens_of(0)).module.graph)
