"""A QLoRA step of a small decoder, and checks that a captured function equals the function."""

from dataclasses import replace
from functools import partial

import torch
from torch.func import grad_and_value

from fquant import LOCAL, NF4_DQ, jit, lora, optim, quantize, random, tree
from fquant.communication import identity
from models import blocks, decoder
from tests.helpers import transform_table
from tests.helpers.arrays import equal

# --- every row of the transform table ---------------------------------------------------------------------------------

ALL = [
    (verb, transform)
    for verb in transform_table.VERBS
    for transform in transform_table.TRANSFORMS
    if transform not in ("make_fx", "make_fx_vmap", "compile") and (verb, transform) not in transform_table.REFUSED
    if not (transform == "vmap_jvp" and verb.startswith("forward"))  # see test_a_mapped_forward_derivative
]
SOME = ("grad", "vmap_all", "jvp", "grad_grad")


def replays(f, thetas, *rest, same=equal, **options):
    """Check that ``f`` captured with options is the ``same`` as ``f``, for these values and others, by one trace."""
    captured, other = jit(f, **options), tree.map(lambda t: t * 0.7 if t.is_floating_point() else t, thetas)
    first, second = captured(thetas, *rest), captured(other, *rest)
    assert same(first, f(thetas, *rest)) and same(second, f(other, *rest)) and not same(first, second)
    assert len(captured.traced) == 1


# --- a step -----------------------------------------------------------------------------------------------------------

CFG = replace(transform_table.CFG, num_layers=2)
OPT = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
TARGETS = r"layers\.\d+\.(q|v|gate|down)"


def start(dropout=0.0):
    params = decoder.init(CFG, random.key(0))
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", partial(quantize, format=NF4_DQ), params)
    adapters = lora.init(base, TARGETS, rank=2, alpha=4, key=1, dropout=dropout)
    return adapters, OPT.init(adapters), base


def loss(adapters, base, tokens, keys, comm):
    logits = decoder.forward(lora.attach(base, adapters, keys), tokens[..., :-1], CFG, comm)
    targets = tokens[..., 1:]
    return blocks.cross_entropy(logits, targets, count=targets.numel())  # of this rank, on a mesh too


def step(adapters, state, base, tokens, keys=None, comm=LOCAL, reduce=identity):
    grads, value = reduce(grad_and_value(loss)(adapters, base, tokens, keys, comm))
    updates, state = OPT.update(grads, state, adapters)
    return optim.apply_updates(adapters, updates), state, value


def tokens_of(i):
    return random.permutation(random.fold(random.key(2), i), CFG.vocab)[:18].reshape(2, 9).clone()  # and no more memory


def copied(x):
    return tree.map(torch.clone, x)


# --- what is traced again ---------------------------------------------------------------------------------------------

X = torch.arange(6.0).reshape(2, 3)
