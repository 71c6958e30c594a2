"""Where arrays live and how they travel: a mesh, bundles of bytes, pure collectives, and when they are issued."""

from . import schedule
from .across import across, span
from .bundle import Bundle
from .collectives import all_gather, all_reduce, enter, exit, reduce_scatter, traffic
from .comm import comm
from .data import most, psum, reduce, rows, share
from .mesh import close, imagined, mesh
from .place import collect, local, outline, place, replicate
from .regather import regather
from .spec import Rules

__all__ = [
    "Bundle", "Rules", "across", "all_gather", "all_reduce", "close", "collect", "comm", "enter", "exit", "imagined",
    "local", "mesh", "most", "outline", "place", "psum", "reduce", "reduce_scatter", "regather", "replicate", "rows",
    "schedule", "share", "span", "traffic",
]  # fmt: skip
