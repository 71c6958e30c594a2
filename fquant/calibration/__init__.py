"""Calibration: packed weights that fit the inputs that they meet, as pure functions over batches."""

from .channel_scaling import awq
from .half_quadratic import hqq
from .methods import Method, calibrate, importance, round_to_nearest
from .second_order import gptq
from .statistics import Statistics, attach, collect, probes

__all__ = [
    "Method", "Statistics", "attach", "awq", "calibrate", "collect", "gptq", "hqq", "importance", "probes",
    "round_to_nearest",
]  # fmt: skip
