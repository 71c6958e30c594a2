"""Helpers of tests of ops' calls: equality of several results, nodes of a graph, tensors on other devices."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.helpers.formats import alike


def all_alike(got, wanted):
    return len(got) == len(wanted) and all(map(alike, got, wanted))


def nodes(f, *args):
    graph = make_fx(f, tracing_mode="fake")(*args).graph
    return [str(node.target).removesuffix(".default") for node in graph.nodes if node.op == "call_function"]


# --- errors -----------------------------------------------------------------------------------------------------------


def away(t):
    """Return zeros like ``t`` on another device."""
    return torch.zeros(t.shape, dtype=t.dtype, device="cpu" if t.is_meta else "meta")
