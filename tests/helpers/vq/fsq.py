"""Fsq: split from tests.fquant.vq.scalar.test_fsq."""

import torch
from vector_quantize_pytorch import FSQ

from fquant.vq.scalar import fsq
from tests.helpers.vq.peers import like

LEVELS, EVEN = (8, 5, 5, 6), (5, 5, 5, 5)
OPTIONS = {  # ours, and how the peer calls it
    "symmetric": "preserve_symmetry",
    "hard_clamp": "bound_hard_clamp",
    "rotation": "orthogonal_rotation",
    "bias": "projection_has_bias",
}


def both(levels, options):
    """The peer's module and our state of the same numbers."""
    torch.manual_seed(1)
    renamed: dict = {OPTIONS.get(name, name): value for name, value in options.items()}
    peer = FSQ(levels, **renamed).eval()
    return peer, like(fsq.init(0, levels, **options), peer)
