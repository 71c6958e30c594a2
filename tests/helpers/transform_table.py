"""The verbs, transforms and arguments of the table of transforms, and the comparison of one cell with its oracle."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import LOCAL, dequantize, embedding, grouped_linear, linear, lora, quantize, random, remat, tree
from fquant.packed import Packed
from models import decoder
from models.config import Config

ORACLE = {"make_fx": "grad", "make_fx_vmap": "vmap_grad", "compile": "grad"}
CFG = Config(vocab=24, dim=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, hidden=96)
REMAT = replace(LOCAL, wrap=remat)
REMAT2 = replace(LOCAL, wrap=lambda f: remat(f, order=2))
T = 3  # tokens an example
E = 2  # examples, stacked adapters, stacked weights


def draw(name, *shape):
    return random.normal(random.fold(random.key(7), name), shape, torch.float64)


def weights(seed, out, width):
    return {"w": draw(f"w{seed}", out, width).float() * torch.linspace(0.5, 2, out)[:, None]}


def adapted(base, seed, **options):
    """Adapters with a ``b`` that is not zero and a magnitude that is not the norm."""
    fresh = lora.init(base, r".*(w|w2|q|o|gate|down|head)", rank=4, alpha=8, key=seed, dtype=torch.float64, **options)
    noise = lambda path, t: t + 0.1 * draw(f"{seed}{path}", *t.shape)
    return tree.map_with_path(noise, fresh)


def x_data(i):
    return {"x": draw(f"x{i}", T, 64), "key": random.fold(random.key(0), i)}


def token_data(i):
    return {"x": random.permutation(random.fold(random.key(1), i), 24)[:T]}


def wave(y):
    """A scalar with derivatives of every order, every element's different."""
    return (y * torch.linspace(0.2, 1.5, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)).sin().sum()


def mlp(x, base, adapters):
    layers = lora.attach(base, adapters)
    return linear(linear(x, layers["w"]).tanh(), layers["w2"])


def two_weights(seed):
    return {"w": weights(seed, 96, 64)["w"], "w2": weights(seed + 10, 64, 96)["w"]}


def model(seed):
    """The embedding is in float64, for it is what sets the dtype of all that follows."""
    return tree.map_with_path(
        lambda path, t: draw(f"{seed}{path}", *t.shape) * t.shape[-1] ** -0.5, decoder.shapes(CFG)
    )


def forward(comm):
    def f(theta, base, data):
        return wave(decoder.forward(lora.attach(base, theta), data["x"], CFG, comm))

    return f


def over(verb):
    """A verb of the weight ``w`` that is adapted by theta."""

    def f(theta, base, data):
        return wave(verb(data["x"], lora.attach(base, theta, data.get("key"))["w"]))

    return f


def attached(theta, base, data):
    """An adapter beside a weight, in theta with a factor of x."""
    return wave(linear(theta["x"] * data["x"], lora.attach(base, theta["lora"])["w"]))


def plain_linear(theta, base, data):
    return wave(linear(theta["x"] * data["x"], base["w"], theta["bias"]))


def grouped(theta, base, data):
    """The rows of four groups, one of them empty; their numbers differ from example to example."""
    layers = lora.attach(base, theta.get("lora", {}))
    return wave(grouped_linear(theta["x"] * data["x"], layers["w"], data["counts"], theta["bias"]))


def group_data(i):
    return {"x": draw(f"x{i}", 7, 64), "counts": torch.tensor([2 - i % 3, 0, 1 + 2 * (i % 3), 4 - i % 3])}


def group_weights(seed):
    return {"w": draw(f"w{seed}", 4, 24, 64).float()}


def group_floats(base, seed):
    return {"x": draw(f"t{seed}", 64), "bias": draw(f"b{seed}", 4, 24)}


def group_adapters(base, seed):
    return group_floats(base, seed) | {"lora": adapted(base, seed)}


def shared_adapters(base, seed):
    return group_floats(base, seed) | {"lora": adapted(base, seed, shared=True)}


def plain_embedding(theta, base, data):
    return wave(embedding(data["x"], base["w"]) * theta["x"])


def remat_linear(order):
    def f(theta, base, data):
        return wave(remat(mlp, order)(data["x"], base, theta))

    return f


def floats(out):
    return lambda base, seed: {"x": draw(f"t{seed}", 64), "bias": draw(f"b{seed}", out)}


def scale(base, seed):
    return {"x": draw(f"t{seed}", 64)}


def beside_x(base, seed):
    return scale(base, seed) | {"lora": adapted(base, seed)}


def dora(base, seed):
    return adapted(base, seed, dora=True)


def dropped(base, seed):
    return adapted(base, seed, dropout=0.4)


def dropped_dora(base, seed):
    return adapted(base, seed, dropout=0.4, dora=True)


VERBS = {  # f, weights of a seed, theta of (weights, seed), data of an example
    "linear": (plain_linear, lambda s: weights(s, 96, 64), floats(96), x_data),
    "square": (plain_linear, lambda s: weights(s, 64, 64), floats(64), x_data),
    "grouped": (grouped, group_weights, group_floats, group_data),
    "grouped_adapted": (grouped, group_weights, group_adapters, group_data),
    "grouped_shared": (grouped, group_weights, shared_adapters, group_data),
    "embedding": (plain_embedding, lambda s: weights(s, 24, 64), scale, token_data),
    "attach": (attached, lambda s: weights(s, 64, 64), beside_x, x_data),
    "attach_embedding": (over(embedding), lambda s: weights(s, 24, 64), dora, token_data),
    "dora": (over(linear), lambda s: weights(s, 96, 64), dora, x_data),
    "dropout": (over(linear), lambda s: weights(s, 64, 64), dropped, x_data),
    "dropout_dora": (over(linear), lambda s: weights(s, 64, 64), dropped_dora, x_data),
    "remat": (remat_linear(1), two_weights, adapted, x_data),
    "remat2": (remat_linear(2), two_weights, adapted, x_data),
    "forward": (forward(LOCAL), model, adapted, token_data),
    "forward_remat": (forward(REMAT), model, adapted, token_data),
    "forward_remat2": (forward(REMAT2), model, adapted, token_data),
}


def stacked(trees):
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


def dot(a, b):
    return sum((x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def pushed(f):
    """The derivative of ``f`` in theta along ``v``."""
    return lambda theta, v, *rest: jvp(lambda t: f(t, *rest), (theta,), (v,))[1]


def cotangent(device="cpu"):
    """A weight for each of E examples."""
    return torch.linspace(1, -0.5, E, dtype=torch.float64, device=device)


def pulled(f, theta):
    """The gradient of a weighted sum of E results."""
    y, pull, *_ = vjp(f, theta)
    return pull(cotangent(y.device))[0]


def traced(g, *args):
    return make_fx(g, tracing_mode="fake")(*args)(*args)


def compiled(g, *args):
    torch._dynamo.reset()
    return torch.compile(g, backend="aot_eager", fullgraph=True)(*args)


# Each is given f, E thetas, a direction, E bases and E examples.
TRANSFORMS = {
    "grad": lambda f, t, v, w, x: grad(f)(t[0], w[0], x[0]),
    "vmap": lambda f, t, v, w, x: vmap(f, (None, None, 0))(t[0], w[0], stacked(x)),
    "vmap_grad": lambda f, t, v, w, x: vmap(grad(f), (None, None, 0))(t[0], w[0], stacked(x)),
    "vmap_thetas": lambda f, t, v, w, x: vmap(grad(f), (0, None, None))(stacked(t), w[0], x[0]),
    "vmap_weights": lambda f, t, v, w, x: vmap(grad(f), (None, 0, None))(t[0], stacked(w), x[0]),
    "vmap_all": lambda f, t, v, w, x: vmap(grad(f))(stacked(t), stacked(w), stacked(x)),
    "vmap_vmap": lambda f, t, v, w, x: vmap(vmap(grad(f), (None, None, 0)), (0, 0, None))(
        stacked(t), stacked(w), stacked(x)
    ),
    "jvp": lambda f, t, v, w, x: pushed(f)(t[0], v, w[0], x[0]),
    "vmap_jvp": lambda f, t, v, w, x: vmap(pushed(f), (None, None, 0, 0))(t[0], v, stacked(w), stacked(x)),
    "grad_grad": lambda f, t, v, w, x: grad(lambda s: dot(grad(f)(s, w[0], x[0]), v))(t[0]),
    "jvp_grad": lambda f, t, v, w, x: pushed(grad(f))(t[0], v, w[0], x[0]),
    "grad_jvp": lambda f, t, v, w, x: grad(pushed(f))(t[0], v, w[0], x[0]),
    "vmap_grad_grad": lambda f, t, v, w, x: vmap(grad(lambda s, b, d: dot(grad(f)(s, b, d), v)), (None, 0, 0))(
        t[0], stacked(w), stacked(x)
    ),
    "vjp": lambda f, t, v, w, x: pulled(lambda s: vmap(f, (None, None, 0))(s, w[0], stacked(x)), t[0]),
    "make_fx": lambda f, t, v, w, x: traced(grad(f), t[0], w[0], x[0]),
    "make_fx_vmap": lambda f, t, v, w, x: traced(vmap(grad(f), (None, None, 0)), t[0], w[0], stacked(x)),
    "compile": lambda f, t, v, w, x: compiled(grad(f), t[0], w[0], x[0]),
}

TWICE = ("grad_grad", "jvp_grad", "vmap_grad_grad")
REFUSED = {
    **{(verb, t): r"remat\((mlp|_block|_final)\) gives first derivatives only" for verb in ("remat", "forward_remat")
       for t in TWICE},
    **{(verb, "compile"): r"remat\(mlp\) cannot be traced by torch.compile" for verb in ("remat", "remat2")},
}  # fmt: skip


def pack(base, format):
    return tree.map_with_path(
        lambda path, t: quantize(t.float(), format) if t.ndim >= 2 and path != "embed" else t, base
    )


@cache
def arguments(verb, format, first=0):
    """What a transform is given beside f: thetas, a direction, packed bases, and examples from the ``first`` on."""
    _, make_base, make_theta, make_data = VERBS[verb]
    packed = [pack(make_base(seed), format) for seed in range(E)]
    thetas = [make_theta(w, seed) for seed, w in enumerate(packed)]
    v = tree.map_with_path(lambda path, t: draw(f"v{path}", *t.shape), thetas[0])
    return thetas, v, packed, [make_data(first + i) for i in range(E)]


def unpack(base, dtype):
    is_packed = lambda x: isinstance(x, Packed)
    return tree.map_with_path(lambda _, x: dequantize(x).to(dtype) if is_packed(x) else x, base, is_leaf=is_packed)


@cache
def decoded(verb, format):
    """The bases of ``arguments``, dense."""
    dtype = torch.float32 if "embedding" in verb else torch.float64
    return [unpack(w, dtype) for w in arguments(verb, format)[2]]


IN_FLOAT32 = ("embedding", "attach_embedding", "forward")  # verbs of tokens: devices round otherwise


@cache
def of_dense(verb, format, transform):
    """Return what a transform gives of dense weights on the host, of a verb without recomputation."""
    f = forward(LOCAL) if verb.startswith("forward_remat") else VERBS[verb][0]
    if verb.startswith("remat"):
        f = lambda theta, base, data: wave(mlp(data["x"], base, theta))
    *args, _, data = arguments(verb, format)
    return TRANSFORMS[transform](f, *args, decoded(verb, format), data)


def check_transform(verb, format, transform, device):
    """Compare a verb under a transform on ``device`` with the same of dense weights on the host."""
    f, run = VERBS[verb][0], TRANSFORMS[transform]
    there = tree.map(lambda t: t.to(device), arguments(verb, format))
    if message := REFUSED.get((verb, transform)):
        with pytest.raises(RuntimeError, match=message):
            run(f, *there)
        return
    got, wanted = run(f, *there), of_dense(verb, format, ORACLE.get(transform, transform))
    assert tree.structure(got) == tree.structure(wanted)
    for (path, a), b in zip(tree.items(got), tree.leaves(wanted), strict=True):
        assert a.abs().max() > 0, path
        assert a.device == device, path
        a, most = a.cpu(), b.abs().max().item()
        bound = 2e-5 if device.type != "cpu" and verb.startswith(IN_FLOAT32) else 1e-9
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * most, msg=lambda m, p=path: f"{p}: {m}")
