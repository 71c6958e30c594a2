r"""Low-rank adapters: a small tree of floats that is trained beside a large frozen tree.

    adapters = lora.init(base, r"layers\.\d+\.(q|v)", rank=16, alpha=32, key=0)     # dict[path, Lora]

    def loss(adapters, base, tokens):
        return cross_entropy(decoder.forward(lora.attach(base, adapters), tokens), ...)

    grads = torch.func.grad(loss)(adapters, base, tokens)                           # dict[path, Lora] of gradients

The keys of ``adapters`` are the paths of the weights that they adapt. ``attach`` replaces each weight by an Adapted,
inside the differentiated function; ``linear`` then adds the product with ``s · b · a``. Attaching twice adds the
updates of both:

    both  = lora.attach(lora.attach(base, french), lora.scale(legal, 0.5))
    one   = lora.combine([french, legal], [1.0, 0.5], "cat")                        # the same sum as one adapter
    dense = lora.merge(base, one, torch.bfloat16)

Modules: ``adapters`` (init, attach, stack; init_ia3), ``combination`` (scale, combine), ``merging`` (merge,
merge_packed, pack_like, replace_weights), ``decompositions`` (pissa, olora, loftq, eva: adapters that begin as a part
of their weight), ``dithering`` (dither, for merge-aware training), ``slots`` (many adapters in one step).

Sources: LoRA, Hu et al. 2021; rank-stabilised scaling, Kalajdzievski 2023; DoRA, Liu et al. 2024, whose row norms
are constants (their section 4.3). Scaling, initialisation and the place of dropout are those of PEFT.
"""

from ..adapted.nodes import Adapted, AdaptedSlots, Ia3, Lora, LoraSlots
from . import slots
from .adapters import Adapters, attach, init, init_ia3, stack
from .combination import combine, scale
from .decompositions import eva, loftq, olora, pissa
from .dithering import dither
from .merging import merge, merge_packed, pack_like, replace_weights

__all__ = [
    "Adapted", "AdaptedSlots", "Adapters", "Ia3", "Lora", "LoraSlots", "attach", "combine", "dither", "eva", "init",
    "init_ia3", "loftq", "merge", "merge_packed", "olora", "pack_like", "pissa", "replace_weights", "scale", "slots",
    "stack",
]  # fmt: skip
