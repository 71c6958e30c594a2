"""Print results under another default dtype or device of torch: ``python -m tests.helpers.defaults STATE``.

Models are loaded under a default dtype of bfloat16, and scripts begin with a default device: nothing here may depend on
either, nor keep what it made meanwhile. STATE is "none", a dtype, or a device.
"""

import hashlib
import os
import sys
from functools import partial

import torch

NONE = "none"
STATE = sys.argv[1] if __name__ == "__main__" else NONE
if hasattr(torch, STATE):
    torch.set_default_dtype(getattr(torch, STATE))
elif STATE != NONE:
    torch.set_default_device(STATE)

from torch.func import grad, jvp, vmap  # noqa: E402

from fquant import AQ_2X8, NF4_DQ, cost, dequantize, embedding, jit, linear, lora, optim, quantize, random, tree, vq  # noqa: E402
from fquant.kernels.dispatch import VARIABLE  # noqa: E402
from models import decoder  # noqa: E402
from models.config import Config  # noqa: E402
from tests.helpers.formats import KINDS  # noqa: E402

CFG = Config(vocab=64, dim=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, hidden=96)
KEY = torch.tensor(3, dtype=torch.int64, device="cpu")
X = random.normal(random.fold(KEY, "x"), (5, 64), torch.float32)
W = random.normal(random.fold(KEY, "w"), (32, 64), torch.float32)
TOKENS = torch.tensor([[1, 5, 9, 2, 60, 3], [4, 4, 8, 63, 0, 7]], dtype=torch.int64, device="cpu")
STATES = {
    "fsq": lambda: vq.fsq.init(KEY, (5, 4, 3), 8),
    "lfq": lambda: vq.lfq.init(KEY, 3, 8),
    "latent": lambda: vq.latent.init(KEY, (5, 4), 8),
    "fsp": lambda: vq.fsp.init(KEY, (5, 4), 8),
    "simvq": lambda: vq.simvq.init(KEY, 7, 8),
    "book": lambda: vq.init(KEY, 7, 8),
    "affine": lambda: vq.init(KEY, 7, 8, affine=True),
    "parted": lambda: vq.sharded.init(KEY, 7, 8),
    "residual": lambda: vq.residual.init_books(KEY, 7, 8, 2),
    "hierarchical": lambda: vq.hierarchical.init(KEY, 7, 8, (1, 3, 5)),
}


def packed(format):
    """Everything that is done with an array of one format."""
    w = quantize(W, format)
    wide = quantize(W.to(torch.bfloat16), format)
    x = X.to(torch.bfloat16)
    return (
        [w, dequantize(w), dequantize(wide), linear(X, w), linear(x, wide), linear(x[:1], wide)],
        grad(lambda x: linear(x, w).square().sum())(X),
        jvp(lambda x: linear(x, w), (X,), (X,))[1],
        vmap(lambda x: linear(x, w))(X),
        None if format.flat else embedding(TOKENS % 32, w),
        jit(lambda x, w: (linear(x, w) * 2 + 1).exp().sum(0))(X, w),
    )


def step():
    """A step of QLoRA, captured."""
    params = decoder.init(CFG, KEY, torch.float32)
    base = tree.map(lambda t: quantize(t, NF4_DQ) if t.ndim == 2 and t.shape[0] != CFG.vocab else t, params)
    adapters = lora.init(base, r"layers\..*\.(q|up)", 4, key=KEY)
    rule = optim.adamw(1e-2)

    def take(adapters, state, base, tokens):
        loss = lambda adapters: decoder.loss(lora.attach(base, adapters), tokens, tokens, CFG)
        updates, state = rule.update(grad(loss)(adapters), state, adapters)
        return optim.apply_updates(adapters, updates), state

    given = adapters, rule.init(adapters), base, TOKENS
    return take(*given), jit(take)(*given), str(cost(take, *given))


def decompositions():
    """Adapters that begin as a part of a weight, their sums and their merges."""
    base = {"w": W, "p": quantize(W, NF4_DQ)}
    (first, rest), (second, _) = lora.pissa(base, "w|p", 4), lora.olora(base, "w|p", 4)
    both = [lora.combine([first, second], [1.0, -0.5], method) for method in ("cat", "linear", "svd")]
    return (
        rest,
        both,
        lora.loftq(base, "w", 4, iterations=2),
        lora.eva(base, {"w": X}, 2),
        lora.merge_packed(base, first),
    )


COMPUTED = {
    **{format.name: partial(packed, format) for format in KINDS},
    "aq_2x8": lambda: packed(AQ_2X8),
    **{f"init of {name}": make for name, make in STATES.items()},
    "numbers": lambda: [
        random.uniform(KEY, (5,)), random.normal(KEY, (3,)), random.permutation(KEY, 9), random.dropout(X, 0.5, KEY),
        random.kaiming_uniform(KEY, (2, 3), 3), random.bernoulli(KEY, 0.5, (4,)),
    ],
    "step": step,
    "decompositions": decompositions,
    "chain": lambda: jit(lambda x: ((x * 2 + 1).neg() / 3).sum(0))(X),
}  # fmt: skip


def digest(x):
    """A number for a tree."""
    found = hashlib.md5()
    for path, leaf in tree.items(x):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{path} {leaf.dtype} {tuple(leaf.shape)} {leaf.device}".encode())
            found.update(bytes(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        else:
            found.update(f"{path} {leaf!r}".encode())
    return found.hexdigest()[:12]


def digests():
    """Compute everything on each backend; return a line for each result or error."""
    lines = []
    for name, compute in COMPUTED.items():
        for backend in ("cpu", "reference"):
            os.environ[VARIABLE] = backend
            try:
                result = digest(compute())
            except Exception as error:  # compared as a result is
                result = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            lines.append(f"{name}, {backend}: {result}")
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(*digests(), sep="\n")
