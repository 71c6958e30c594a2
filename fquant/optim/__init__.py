"""Optimisers as pairs of pure functions, and learning rates as functions of the step.

    opt = chain(clip_by_global_norm(1.0), adamw(cosine(2e-4, total=1000, warmup=50), moments=DYNAMIC8))
    state = opt.init(params)
    updates, state = opt.update(grads, state, params)
    params = apply_updates(params, updates)        # or params, state = step(opt, grads, state, params)

An update is *added* to a parameter: sign and learning rate are already in it. Moments have the structure of the
parameters, and each leaf is float32 or packed (``moments``). Everything is computed in float32; ``apply_updates``
rounds once, to the parameter's dtype, and with a key stochastically.

The arithmetic is torch's. AdamW, Lion and Muon decay weights beside the gradient; Adam and SGD add the decay to the
gradient. A schedule gets the number of updates made before, so the first is step 0.
"""

from .adaptive import adam, adamw
from .factored import FactoredState, adafactor
from .moments import DYNAMIC4, DYNAMIC8, DYNAMIC8_GRID, DYNAMIC8_TORCHAO, FP8, Moments
from .momentum import lion, sgd
from .optimizer import (
    RANGES,
    AdamState,
    MomentumState,
    Optimizer,
    apply_updates,
    chain,
    clip_by_global_norm,
    global_norm,
    step,
)
from .orthogonal import muon
from .partitioning import partition
from .schedules import Rate, Schedule, constant, cosine, linear

__all__ = [
    "DYNAMIC4", "DYNAMIC8", "DYNAMIC8_GRID", "DYNAMIC8_TORCHAO", "FP8", "RANGES", "AdamState", "FactoredState",
    "MomentumState", "Moments",
    "Optimizer", "Rate", "Schedule", "adafactor", "adam", "adamw", "apply_updates", "chain", "clip_by_global_norm",
    "constant", "cosine", "global_norm", "linear", "lion", "muon", "partition", "sgd", "step",
]  # fmt: skip
