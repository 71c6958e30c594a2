"""Roofline: the time of a captured graph on a device, from what each node computes and moves (Williams et al. 2009).

devices.py    peaks of cards, the shares of them that kernels reach, and measured figures of any other device
work.py       what a node computes, moves and sends, by kind
predict.py    the time of a graph, with collectives and copies beside it, and its limit
"""

from .devices import DEVICES, Device, Shares, measured, of
from .predict import Prediction, Spent, limit, predict, walk
from .work import ELEMENTWISE, KINDS, Work, scratch, seconds, traffic, work

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
    "of",
    "predict",
    "scratch",
    "seconds",
    "traffic",
    "walk",
    "work",
]
