"""The table: every verb x every transform x every format, against the same computation on the dequantised weights.

All formats that the package names are the base of an adapter, and are differentiated in it and in x; other verbs have
some of each kind.

A verb is a scalar function f(theta, base, data): ``theta`` is what is differentiated (floats), ``base`` holds the
weights (quantised, or dequantised for the oracle), ``data`` is one example. All of it is in float64, to which a decoded
weight is exact, so that packed and dense agree to rounding and any wrong derivative shows. (What an embedding decodes
is in the weight's own float32, there and in the oracle.)
"""

import pytest
import torch

from fquant import AQ_3X8, FP4, INT4_ZERO, INT8, NF4, NF4_DQ
from tests.helpers.formats import KNOWN
from tests.helpers.transform_table import TRANSFORMS, VERBS, check_transform

COMPILED = (
    "linear",
    "grouped",
    "grouped_adapted",
    "embedding",
    "attach",
    "dora",
    "dropout",
    "remat",
    "remat2",
)  # others meet the same Functions

SOME = (NF4, NF4_DQ, INT8, FP4, AQ_3X8, INT4_ZERO)


def in_ci(verb, format, transform):
    """What is traced takes long: a decoded and a looked-up format stand for all."""
    if transform == "compile":
        return format in (NF4_DQ, AQ_3X8) and verb in COMPILED
    return verb == "linear" or format in (NF4_DQ, AQ_3X8) or not transform.startswith("make_fx")


ROWS = [
    pytest.param(
        verb,
        format,
        transform,
        id=f"{verb}-{format.name}-{transform}",
        marks=[] if in_ci(verb, format, transform) else pytest.mark.slow,
    )
    for verb in VERBS
    for format in (KNOWN.values() if verb == "attach" else SOME)
    for transform in TRANSFORMS
    if format in (NF4, NF4_DQ, INT8)
    or verb in ("linear", "attach")
    or (format in (AQ_3X8, INT4_ZERO) and verb in ("embedding", "dora", "remat2"))
    # What takes seconds is done in one format.
    if format is NF4_DQ or not (transform == "compile" or verb.startswith("forward_remat")) or verb == "linear"
    if format is NF4_DQ or not (transform.startswith("make_fx") and verb.startswith("forward"))
    if transform != "compile" or not verb.startswith("forward_remat")
]


@pytest.mark.parametrize("verb, format, transform", ROWS)
def test_transform(verb, format, transform, device):
    if transform == "compile" and verb.startswith("grouped") and torch.__version__ < "2.13":
        pytest.skip("Dynamo of torch 2.11 cannot trace the Function of grouped products")
    check_transform(verb, format, transform, device)
