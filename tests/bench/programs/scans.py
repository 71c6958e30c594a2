"""How long a capture takes for 2, 8, 32 and 80 layers, as a scan and as a Python loop: trace, passes and memory plan.

    python -m tests.bench.programs.scans

The program is a QLoRA step of the decoder's layers in the shapes of Llama-3-8B, on tensors of the device meta: layers,
adapters and AdamW's state are stacked. Nothing is computed. The two contestants take turns in one process, on one
thread, in CPU time, and must give equal graphs and plans.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.func import grad_and_value

from fquant import LOCAL, NF4_DQ, lora, optim, quantize, remat, scan, stack_layers, tree, unstack_layers
from fquant.compile.trace import trace
from models import decoder
from models.presets import PRESETS
from models.rope import rope

SIZES = (2, 8, 32, 80)
CFG = PRESETS["llama3-8b"]
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
OPT = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(2e-4))
Loop = Callable[..., tuple[Any, Any]]


def loop(block: Callable[..., tuple[Any, Any]], x: Any, layers: Any, *shared: Any) -> tuple[Any, Any]:
    """Call the block as :func:`fquant.scan` does, and trace every call."""
    for layer in unstack_layers(layers):
        x, _ = block(x, layer, *shared)
    return x, ()


def block(x: torch.Tensor, layer: Any, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Compute one layer of the decoder."""
    return decoder._block(x, (layer, cos, sin, None, None), decoder._attend, CFG, LOCAL)


def step(f: Loop, wrap: Callable[..., Any], adapters: Any, state: Any, base: Any, x: torch.Tensor) -> Any:
    """Take a step of AdamW on the stacked adapters of stacked layers; x [b t d] is the input of the first."""
    angles = [t.to(x.dtype) for t in rope(torch.arange(x.shape[-2]), CFG)]
    loss = lambda adapters: f(wrap(block), x, lora.attach(base, adapters), *angles)[0].float().square().mean()
    grads, value = grad_and_value(loss)(adapters)
    updates, state = OPT.update(grads, state, adapters)
    return optim.apply_updates(adapters, updates), state, value


def arguments(num_layers: int) -> tuple[Any, ...]:
    """Return the arguments of a step of ``num_layers`` layers, on the device meta."""
    layer = decoder.shapes(replace(CFG, num_layers=1), torch.bfloat16).layers[0]
    layer = tree.map_at("|".join(TARGETS), partial(quantize, format=NF4_DQ), layer)
    adapters = lora.init(layer, "|".join(TARGETS), rank=16, alpha=32, key=0)
    base, adapters = (stack_layers([tree.map(lambda t: t.to("meta"), x)] * num_layers) for x in (layer, adapters))
    state = tree.map(lambda t: t.to("meta"), OPT.init(adapters))
    return adapters, state, base, torch.empty(1, 512, CFG.dim, dtype=torch.bfloat16, device="meta")


def captured(f: Loop, wrap: Callable[..., Any], num_layers: int) -> tuple[float, float, int, int]:
    """Return the seconds of trace and passes, those of the plan, the nodes, and the bytes of the plan."""
    args = arguments(num_layers)
    donated = {id(t) for t in tree.leaves(args[:2])}
    gc.collect()  # what the capture before has left
    times = [time.process_time()]
    found = trace(lambda args: step(f, wrap, *args), args, donated)
    times.append(time.process_time())
    placed = found.laid_out().placed
    times.append(time.process_time())
    assert placed is not None
    return times[1] - times[0], times[2] - times[1], len(found.module.graph.nodes), placed.nbytes


def main() -> None:
    """Print a row for each number of layers, with all saved and with recomputed layers."""
    torch.set_num_threads(1)
    for f in (scan, loop):
        captured(f, remat, 1)
    print("| layers | saved | nodes | trace and passes, s: scan, loop | plan, s |\n| --- | --- | --- | --- | --- |")
    for saved, wrap in (("all", lambda f: f), ("inputs", remat)):
        for num_layers in SIZES:
            ours, theirs = (captured(f, wrap, num_layers) for f in (scan, loop))
            assert ours[2:] == theirs[2:]
            print(
                f"| {num_layers} | {saved} | {ours[2]} | {ours[0]:.2f}, {theirs[0]:.2f} | {ours[1]:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
