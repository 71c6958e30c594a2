"""The time of a captured graph on a device, by the roofline of each node.

    devices.py       peaks of cards, and the shares of them that kernels reach
    nodes.py         what a node computes, moves and sends, by kind
    prediction.py    the time of a graph, with collectives beside it, and its limit

A roofline is the longer of two times: arithmetic, and memory traffic (Williams, Waterman and Patterson 2009).
"""

from .devices import DEVICES, Device, Shares, measured, named, of
from .fused import seconds_if_fused
from .nodes import ELEMENTWISE, KINDS, Work, scratch, seconds, traffic, work
from .prediction import Prediction, Spent, limit, predict, walk

__all__ = [
    "DEVICES",
    "ELEMENTWISE",
    "KINDS",
    "Device",
    "Prediction",
    "Shares",
    "Spent",
    "Work",
    "limit",
    "measured",
    "named",
    "of",
    "predict",
    "scratch",
    "seconds",
    "seconds_if_fused",
    "traffic",
    "walk",
    "work",
]
