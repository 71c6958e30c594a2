"""The compiler of pure steps: ``jit`` traces a function into a graph, passes rewrite it, and replays run it.

    jit.py          the cache of traces, and the call that a user makes
    trace.py        a function of trees as one torch.fx graph, on fake tensors
    arguments.py    the leaves and the structure of a call's arguments
    guards.py       what a trace is valid for; closure.py and user_code.py: Python values that the function closes over
    tracing/        the ops of a function as a graph, on fake tensors; errors.py names the cause of a failed trace
    graph.py        what nodes read, write and share; liveness.py: how long memory is held
    passes/         rewrites of the graph that keep every bit of its results
    donation.py     results written over donated tensors, which raise when they are used again
    memory/         where results are placed, and the replay in that memory
    validate.py     the first replay, which checks every node; torch_compile.py: the graph as torch.compile runs it
    cost.py         peak memory, FLOPs and bytes on the wire, read off the graph

Other packages import these names from here, and no module of this package.
"""

from . import graph, liveness
from .collective_check import all_gather_text, exchange_by
from .cost import flops
from .graph import Pass
from .trace import Captured
from .tracing.tracer import is_traced

__all__ = ["Captured", "Pass", "all_gather_text", "exchange_by", "flops", "graph", "is_traced", "liveness"]
