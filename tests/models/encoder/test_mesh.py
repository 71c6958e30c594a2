"""An encoder on a mesh, and recomputed in the backward: loss and gradients of one process on the whole batch."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.func import grad_and_value

import shard
from fquant import NF4, lora, quantize, tree
from fquant.activation_checkpoint import remat
from fquant.communication import LOCAL, Comm
from models import encoder
from shard import Rules
from shard.rules import check_dims
from tests.helpers import ranks
from tests.helpers.models.encoders import CONFIGS, MASK, TOKENS, random_params

pytestmark = pytest.mark.xdist_group("ranks")
CFG = dataclasses.replace(CONFIGS["bert, pretraining"], dim=64, hidden=64)
BATCH = TOKENS, MASK, (TOKENS + 7) % 96


def model():
    """Return packed weights and adapters that are not zero."""
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|up|down)", lambda w: quantize(w, NF4), random_params(CFG))
    adapters = lora.init(base, r"layers\.\d+\.(q|v|down)|heads.transform", rank=2, alpha=4, key=0)
    return base, tree.map(lambda t: t + 0.03, adapters)


def loss(adapters: Any, base: Any, tokens: Any, mask: Any, targets: Any, comm: Comm = LOCAL) -> Any:
    """Sum over tokens and sequences, so that parts of a batch add up."""
    params = lora.attach(base, adapters)
    x = encoder.forward(params, tokens, CFG, comm, segments=mask)
    logits = encoder.masked_lm(params, x, CFG, comm).log_softmax(-1)
    words = (logits.gather(-1, targets[..., None])[..., 0] * mask).sum()
    return words / 50 + encoder.next_sentence(params, x, CFG, comm).sin().sum()


def on_mesh(axes: dict[str, int]) -> Any:
    mesh, rules = shard.mesh(**axes), Rules()
    base, adapters = shard.place(model(), encoder.dims(CFG), rules, mesh, CFG)
    comm, part = shard.comm(mesh, rules), shard.share(BATCH, mesh, rules)
    grads, value = grad_and_value(loss)(adapters, shard.local(base), *part, comm)
    return shard.reduce(grads, mesh, rules), shard.psum(value, mesh, rules.batch)


def close(got, wanted):
    for (path, a), b in zip(tree.items(got), tree.leaves(wanted), strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=path)


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"dp": 2}], ids=str)
def test_on_a_mesh(axes):
    base, adapters = model()
    for found in ranks.run(2, on_mesh, axes):
        close(found, grad_and_value(loss)(adapters, base, *BATCH))


def test_recomputed():
    base, adapters = model()
    wanted = grad_and_value(loss)(adapters, base, *BATCH)
    close(grad_and_value(loss)(adapters, base, *BATCH, Comm(wrap=remat)), wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_dims_name_every_weight(name):
    check_dims(encoder.dims(CONFIGS[name]), encoder.shapes(CONFIGS[name]))
