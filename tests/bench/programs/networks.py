"""Programs of networks: low-rank adapters, experts, graphs, convolutions, samples.

Each function takes a size and returns a function of trees of tensors with its arguments.
"""

import torch
from torch.func import grad, grad_and_value
from torch.nn.functional import conv2d, gelu, group_norm, leaky_relu, silu


def low_rank_layers(size: int):
    """Gradients of low-rank adapters of 24 layers with a residual."""

    def loss(adapters, weights, x):
        h = x
        for w, (a, b) in zip(weights, adapters, strict=True):
            h = h + silu(h @ w + (h @ a) @ b)
        return (h * h).mean()

    weights = [torch.randn(1024, 1024) / 50 for _ in range(24)]
    adapters = [(torch.randn(1024, 8) / 50, torch.randn(8, 1024) / 50) for _ in range(24)]
    return grad(loss), (adapters, weights, torch.randn(size, 1024))


def top_k_routing(size: int):
    """Gradients of two of eight experts for each token, with a loss that balances them (Shazeer et al. 2017)."""

    def loss(params, x, y):
        chances = (x @ params["router"]).softmax(-1)
        best, chosen = chances.topk(2)
        best = best / best.sum(-1, keepdim=True)
        gates = torch.zeros_like(chances).scatter(-1, chosen, best)
        hidden = gelu(torch.einsum("nd,edh->neh", x, params["up"]))
        out = torch.einsum("neh,ehd,ne->nd", hidden, params["down"], gates)
        share = (chosen[..., None] == torch.arange(8)).to(x.dtype).sum(1).mean(0)
        return ((out - y) ** 2).mean() + 0.01 * 8 * (share * chances.mean(0)).sum()

    params = {"router": torch.randn(128, 8) / 11, "up": torch.randn(8, 128, 128) / 11}
    params["down"] = torch.randn(8, 128, 128) / 11
    return grad_and_value(loss), (params, torch.randn(size, 128), torch.randn(size, 128))


def pointwise_chain(size: int):
    """A chain of elementwise functions and its gradient."""

    def loss(x, scale, shift):
        for _ in range(4):
            x = torch.tanh(x * scale + shift) + 0.1 * torch.sin(x) * torch.exp(-x * x)
            x = torch.where(x > 0, x, 0.2 * x) / (1 + x.abs()).sqrt()
        return (x**2).mean()

    return grad_and_value(loss, argnums=(0, 1, 2)), (torch.randn(size, 256), torch.randn(256), torch.randn(256))


def graph_attention(size: int):
    """Gradients of two layers of attention over the edges of a graph (Velickovic et al. 2018)."""

    def layer(p, x, sender, receiver):
        h = x @ p["w"]
        score = leaky_relu(h[sender] @ p["from"] + h[receiver] @ p["to"], 0.2)
        top = torch.full((len(x),), float("-inf")).scatter_reduce(0, receiver, score, "amax")
        weight = torch.exp(score - top.detach()[receiver])
        total = torch.zeros(len(x)).index_add(0, receiver, weight)
        message = h[sender] * (weight / total[receiver])[:, None]
        return torch.zeros_like(h).index_add(0, receiver, message)

    def loss(params, x, y, sender, receiver):
        for p in params:
            x = torch.relu(layer(p, x, sender, receiver))
        return ((x - y) ** 2).mean()

    params = [{"w": torch.randn(64, 64) / 8, "from": torch.randn(64) / 8, "to": torch.randn(64) / 8} for _ in range(2)]
    edges = torch.randint(size, (2, 8 * size))
    return grad_and_value(loss), (params, torch.randn(size, 64), torch.randn(size, 64), *edges)


def variational_autoencoder(size: int):
    """Gradients of the evidence bound, with given noise (Kingma & Welling 2014)."""

    def loss(params, x, noise):
        mean, log_variance = (torch.relu(x @ params["in"]) @ params["code"]).chunk(2, dim=-1)
        z = mean + noise * torch.exp(0.5 * log_variance)
        logits = torch.relu(z @ params["up"]) @ params["out"]
        likelihood = x * logits - torch.logaddexp(logits, torch.zeros(()))
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance)
        return (divergence.sum(-1) - likelihood.sum(-1)).mean()

    shapes = {"in": (784, 256), "code": (256, 64), "up": (32, 256), "out": (256, 784)}
    params = {name: torch.randn(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    return grad_and_value(loss), (params, torch.rand(size, 784), torch.randn(size, 32))


def denoising(size: int):
    """Gradients of a small convolutional network that removes noise of a random level (Ho et al. 2020)."""

    def network(p, x, level):
        h = conv2d(x, p["in"], padding=1)
        skip = h
        for w in p["blocks"]:
            scale = (level[:, None] * p["level"]).sin()[:, :, None, None]
            h = h + conv2d(silu(group_norm(h, 4)) * (1 + scale), w, padding=1)
        return conv2d(silu(h + skip), p["out"], padding=1)

    def loss(p, x, noise, level):
        seen = x * level.cos()[:, None, None, None] + noise * level.sin()[:, None, None, None]
        return ((network(p, seen, level) - noise) ** 2).mean()

    p = {"in": torch.randn(32, 1, 3, 3) / 3, "out": torch.randn(1, 32, 3, 3) / 17, "level": torch.randn(32)}
    p["blocks"] = [torch.randn(32, 32, 3, 3) / 17 for _ in range(3)]
    x, noise = torch.randn(size, 1, 28, 28), torch.randn(size, 1, 28, 28)
    return grad_and_value(loss), (p, x, noise, torch.rand(size) * 1.5)
