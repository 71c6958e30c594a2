"""Passes over captured graphs: functions that change a graph in place and keep every bit of its results.

    simplify.py             dead code, aliases, repeated views, constants
    rematerialize.py        cheap tensors computed again in the backward rather than held
    canonicalize.py         in-place ops, shared casts, views and rotary halves in forms that fuse
    fuse_pointwise.py       chains of elementwise nodes as one node, whose results are written over dead arguments

``trace.py`` runs them in this order, user passes behind the first, and donation (``donation.py``) before fusion.
"""
