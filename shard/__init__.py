"""Sharding: a device mesh, parameters as bundles of bytes or floats, pure collectives, passes that schedule them."""

from . import checkpoint, integrity, ordered, passes
from .bundle import Bundle
from .collectives import all_gather, all_reduce, all_to_all, enter, exit, reduce_scatter, traffic
from .communication import comm
from .data import global_norm, max_local_rows, psum, reduce, rows, share
from .device_mesh import abstract_mesh, close, device_of, mesh
from .optimizer_memory import PINNED
from .placement import abstract_local, at_rest, collect, local, on_host, place, replicate
from .row_exchange import exchange_rows, local_range
from .rules import Rules
from .trained import FloatBundle, Precision, RowBundle, on_whole, part, scaled, weights, whole, whole_like, wire_scales
from .transport import wire

__all__ = [
    "PINNED", "Bundle", "FloatBundle", "Precision", "RowBundle", "Rules", "abstract_local", "abstract_mesh",
    "all_gather", "all_reduce", "all_to_all", "at_rest", "checkpoint", "close", "collect", "comm", "device_of", "enter",
    "exchange_rows", "exit", "global_norm", "integrity", "local", "local_range", "max_local_rows", "mesh", "on_host",
    "on_whole", "ordered", "part", "passes", "place", "psum", "reduce", "reduce_scatter", "replicate", "rows", "scaled",
    "share",
    "traffic", "weights", "whole", "whole_like", "wire", "wire_scales",
]  # fmt: skip
