"""Passes over captured graphs: functions that change a graph in place and keep every bit of its results.

    simplify.py             dead code, aliases, repeated views, constants
    decompose.py            ops that allocate inside, by ops that do not
    gate_steps.py           steps of optimisers that a mask gates, in one pass over memory
    rematerialize.py        cheap tensors computed again in the backward rather than held
    donate.py               results written over the arguments that the caller gives away
    canonicalize.py         in-place ops, shared casts, views and rotary halves in forms that fuse
    fuse_pointwise.py       chains of elementwise nodes as one node; pointwise_lowering.py: a node as a step of one
    reinplace.py            results of such a node written over its dead arguments

``trace.py`` runs them in this order, and user passes behind the first.
"""
