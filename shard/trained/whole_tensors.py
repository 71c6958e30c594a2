"""Optimisers that need whole tensors, such as Muon and Adafactor, on trained bundles.

    matrices = optim.partition({r"layers\\.\\d+\\.(q|k|v|o|gate|up|down)": optim.muon(0.02), ".*": optim.adamw(3e-4)})
    opt = shard.on_whole(matrices, mesh, rules)

AdamW, Lion and SGD update each element alone, so they take a rank's part as it is. Muon makes a matrix orthogonal, and
Adafactor takes means of rows and columns. Here every rank gathers parameters and gradients, makes the whole update, and
keeps its part. So updates are those of one process, paths are those of weights, and each rank has the whole state.
"""

from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fquant import tree

from ..collectives import collective
from ..device_mesh import position
from ..rules import Rules
from .reshard import is_trained, opened, part


def on_whole(optimizer: Any, mesh: DeviceMesh, rules: Rules) -> Any:
    """Return ``optimizer``, an ``optim.Optimizer``, for local trees of bundles, with a state of whole tensors.

        rank 0  FloatBundle(first half of a gradient)   ->  FloatBundle(first half of the update)
        rank 1  FloatBundle(second half)                ->  FloatBundle(second half)

    One all-gather for each bundle of the gradients, and one for each of the parameters. ``optim.global_norm`` is the
    norm of the whole gradient inside. The state is the same on all ranks, so a file of it fits any mesh.
    """
    group = mesh.get_group(rules.block) if rules.block and position(mesh, rules.block)[1] > 1 else None
    gathered = lambda path, t: collective(t, "all_gather", group, [path]) if group is not None else t
    one = lambda path, y: opened(y, partial(gathered, path)) if is_trained(y) else y
    whole = lambda x: tree.map_with_path(one, x, is_leaf=is_trained)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(whole(grads), state, whole(params))
        return part(updates, params, mesh, rules), state

    return type(optimizer)(lambda params: optimizer.init(whole(params)), update)
