"""Programs of how models learn: gradients of gradients, gradients of each sample, ensembles, features.

Each function takes a size and returns a function of trees of tensors with its arguments.
"""

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.nn.functional import cross_entropy, normalize, relu, softplus


def _linears(*dims: int) -> list[dict[str, Tensor]]:
    return [{"w": torch.randn(i, o) / i**0.5, "b": torch.zeros(o)} for i, o in zip(dims, dims[1:], strict=False)]


def _mlp(params: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    for layer in params[:-1]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def maml(size: int):
    """Gradients through three steps of gradient descent, for each of 16 tasks (Finn et al. 2017)."""

    def adapted(params, x, y):
        for _ in range(3):
            grads = grad(lambda p: ((_mlp(p, x) - y) ** 2).mean())(params)
            params = [{k: p[k] - 0.05 * g[k] for k in p} for p, g in zip(params, grads, strict=True)]
        return params

    def loss(params, x, y, query, wanted):
        def task(x, y, query, wanted):
            return ((_mlp(adapted(params, x, y), query) - wanted) ** 2).mean()

        return vmap(task)(x, y, query, wanted).mean()

    x, query = torch.randn(16, size, 1), torch.randn(16, size, 1)
    return grad_and_value(loss), (_linears(1, 64, 64, 1), x, x.sin(), query, query.sin())


def private_gradients(size: int):
    """The mean of each sample's gradient, cut to norm 1 (Abadi et al. 2016)."""

    def sample(params, x, y):
        return cross_entropy(_mlp(params, x), y)

    def clipped(params, x, y):
        grads = grad(sample)(params, x, y)
        norm = torch.stack([g.square().sum() for layer in grads for g in layer.values()]).sum().sqrt()
        scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        return [{k: g * scale for k, g in layer.items()} for layer in grads]

    def step(params, x, y):
        grads = vmap(clipped, in_dims=(None, 0, 0))(params, x, y)
        return [{k: g.mean(0) for k, g in layer.items()} for layer in grads]

    return step, (_linears(64, 128, 128, 10), torch.randn(size, 64), torch.randint(10, (size,)))


def sparse_autoencoder(size: int):
    """A step of Adam for a sparse autoencoder that keeps the 32 largest features (Gao et al. 2024)."""

    def loss(params, x):
        features = relu((x - params["centre"]) @ params["encode"])
        kept, at = features.topk(32)
        sparse = torch.zeros_like(features).scatter(-1, at, kept)
        return ((sparse @ params["decode"] + params["centre"] - x) ** 2).sum(-1).mean()

    def step(params, mean, square, x):
        grads, value = grad_and_value(loss)(params, x)
        mean = {k: 0.9 * m + 0.1 * grads[k] for k, m in mean.items()}
        square = {k: 0.999 * v + 0.001 * grads[k] ** 2 for k, v in square.items()}
        params = {k: p - 1e-3 * mean[k] / (square[k].sqrt() + 1e-8) for k, p in params.items()}
        return params, mean, square, value

    width = 1024
    params = {
        "encode": torch.randn(128, width) / 11,
        "decode": torch.randn(width, 128) / 32,
        "centre": torch.zeros(128),
    }
    zeros = [{k: torch.zeros_like(p) for k, p in params.items()} for _ in range(2)]
    return step, (params, *zeros, torch.randn(size, 128))


def ensemble(size: int):
    """Gradients of eight stacked networks that predict a mean and a variance (Lakshminarayanan et al. 2017)."""

    def loss(params, x, y):
        mean, raw = _mlp(params, x).chunk(2, dim=-1)
        variance = softplus(raw) + 1e-3
        return (0.5 * variance.log() + (y - mean) ** 2 / (2 * variance)).mean()

    members = [_linears(16, 128, 128, 2) for _ in range(8)]
    stacked = [{k: torch.stack([m[i][k] for m in members]) for k in ("w", "b")} for i in range(3)]
    return vmap(grad_and_value(loss), in_dims=(0, None, None)), (stacked, torch.randn(size, 16), torch.randn(size, 1))


def contrastive(size: int):
    """Gradients of InfoNCE between two views of a batch (Chen et al. 2020)."""

    def loss(params, first, second):
        a, b = normalize(_mlp(params, first), dim=-1), normalize(_mlp(params, second), dim=-1)
        z = torch.cat([a, b])
        similar = (z @ z.T) / 0.1
        similar = similar.masked_fill(torch.eye(2 * size, dtype=torch.bool, device=z.device), float("-inf"))
        return cross_entropy(similar, torch.arange(2 * size, device=z.device).roll(size))

    views = torch.randn(size, 128), torch.randn(size, 128)
    return grad_and_value(loss), (_linears(128, 256, 256, 64), *views)
