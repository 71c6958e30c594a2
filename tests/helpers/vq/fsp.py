"""FSP beside vector-quantize-pytorch: a peer and our state with its projections."""

from dataclasses import replace

import torch
from vector_quantize_pytorch import FSP

from fquant.vq.scalar import fsp
from tests.helpers.vq.peers import projections

LEVELS = (8, 5, 5, 6)
MOMENTS = {"none": None, "kurt": fsp.KURT, "var": fsp.VAR, "var_tanh": fsp.VAR_TANH, "var_sigmoid": fsp.VAR_SIGMOID,
           "var_laplace": fsp.VAR_LAPLACE}  # fmt: skip
RENAMED = {
    "distribution": "act_name",
    "inverse": "need_inv_act",
    "moments": "vector_norm",
    "bias": "projection_has_bias",
}


def both(options: dict):
    torch.manual_seed(1)
    given = dict(options)
    renamed: dict = {RENAMED.get(name, name): value for name, value in given.items()}
    peer = FSP(LEVELS, quantize_rate=1.0, **renamed)
    if "moments" in given:
        given["moments"] = MOMENTS[given["moments"]]
    state = fsp.init(0, LEVELS, **given)
    return peer, replace(state, params=projections(peer))
