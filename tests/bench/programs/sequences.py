"""Programs over time: loops of small steps, attention, scans.

Each function takes a size and returns a function of trees of tensors with its arguments.
"""

import torch
from torch import Tensor
from torch.func import grad, grad_and_value
from torch.nn.functional import cross_entropy, layer_norm, relu, silu, softplus


def lstm(size: int):
    """Gradients of an LSTM that is written out, over 32 steps (Hochreiter & Schmidhuber 1997)."""

    def cell(params, h, c, x):
        i, f, g, o = (x @ params["x"] + h @ params["h"] + params["b"]).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def loss(params, xs, targets):
        h = c = torch.zeros(xs.shape[1], 128)
        total = torch.zeros(())
        for x, target in zip(xs.unbind(), targets.unbind(), strict=True):
            h, c = cell(params, h, c, x)
            total = total + cross_entropy(h @ params["out"], target)
        return total / len(xs)

    params = {"x": torch.randn(64, 512) / 8, "h": torch.randn(128, 512) / 11, "b": torch.zeros(512)}
    params["out"] = torch.randn(128, 64) / 11
    return grad_and_value(loss), (params, torch.randn(32, size, 64), torch.randint(64, (32, size)))


def hidden_markov(size: int):
    """Gradients of the likelihood of a hidden Markov model, forward algorithm over 64 steps."""

    def loss(params, symbols):
        move, emit = params["move"].log_softmax(-1), params["emit"].log_softmax(-1)
        alpha = params["start"].log_softmax(-1) + emit[:, symbols[:, 0]].T
        for t in range(1, symbols.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + move, dim=1) + emit[:, symbols[:, t]].T
        return -torch.logsumexp(alpha, dim=-1).mean()

    params = {"start": torch.randn(32), "move": torch.randn(32, 32), "emit": torch.randn(32, 20)}
    return grad_and_value(loss), (params, torch.randint(20, (size, 64)))


def selective_scan(size: int):
    """Gradients of a selective state space, its scan written as a loop of 64 steps (Gu & Dao 2023)."""

    def mix(params, x):  # [batch, time, channel]
        step = softplus(x @ params["step"])
        b, c = x @ params["b"], x @ params["c"]
        decay = torch.exp(step[..., None] * -torch.exp(params["a"]))
        add = (step * x)[..., None] * b[:, :, None]
        state, out = torch.zeros_like(add[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + add[:, t]
            out.append((state * c[:, t, None]).sum(-1))
        return torch.stack(out, dim=1) * silu(x @ params["gate"])

    def loss(params, x, y):
        return ((mix(params, x) - y) ** 2).mean()

    dim, states = 64, 8
    params = {name: torch.randn(dim, dim) / 8 for name in ("step", "gate")}
    params |= {name: torch.randn(dim, states) / 8 for name in ("a", "b", "c")}
    return grad_and_value(loss), (params, torch.randn(size, 64, dim), torch.randn(size, 64, dim))


def alibi_attention(size: int):
    """Gradients of two blocks whose attention is written out, with linear biases (Press et al. 2022)."""
    heads, dim, time = 4, 128, 128

    def block(p, x, bias):
        h = layer_norm(x, (dim,), p["norm"])
        q, k, v = (h @ p["qkv"]).view(*x.shape[:2], 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / (dim // heads) ** 0.5 + bias).softmax(-1)
        x = x + (weights @ v).transpose(1, 2).reshape(x.shape) @ p["out"]
        return x + relu(layer_norm(x, (dim,), p["norm"]) @ p["up"]).square() @ p["down"]

    def loss(blocks, x, y):
        at = torch.arange(time)
        slopes = 2.0 ** -torch.arange(1, heads + 1)
        bias = slopes[:, None, None] * (at[None] - at[:, None]).clamp(max=0)
        bias = bias.masked_fill(at[None] > at[:, None], float("-inf"))
        for p in blocks:
            x = block(p, x, bias)
        return ((x - y) ** 2).mean()

    def params() -> dict[str, Tensor]:
        shapes = {"qkv": (dim, 3 * dim), "out": (dim, dim), "up": (dim, 4 * dim), "down": (4 * dim, dim)}
        return {"norm": torch.ones(dim)} | {
            name: torch.randn(shape) / shape[0] ** 0.5 for name, shape in shapes.items()
        }

    x, y = torch.randn(size, time, dim), torch.randn(size, time, dim)
    return grad_and_value(loss), ([params() for _ in range(2)], x, y)


def policy_gradient(size: int):
    """Gradients of PPO with generalised advantages over 64 steps (Schulman et al. 2017)."""

    def advantages(rewards, values):
        gain, out = torch.zeros_like(rewards[0]), []
        for t in reversed(range(len(rewards))):
            gain = rewards[t] + 0.99 * values[t + 1] - values[t] + 0.99 * 0.95 * gain
            out.append(gain)
        return torch.stack(out[::-1])

    def loss(params, seen, actions, old, rewards):
        h = torch.tanh(seen @ params["w"])
        values, logits = (h @ params["value"]).squeeze(-1), h @ params["policy"]
        gain = advantages(rewards, values.detach())
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        now = logits[:-1].log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)
        ratio = torch.exp(now - old)
        policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return policy + 0.5 * (values[:-1] - (gain + values[:-1].detach())).square().mean()

    params = {"w": torch.randn(32, 256) / 6, "value": torch.randn(256, 1) / 16, "policy": torch.randn(256, 8) / 16}
    seen, rewards = torch.randn(65, size, 32), torch.randn(64, size)
    return grad(loss), (params, seen, torch.randint(8, (64, size)), torch.full((64, size), -2.0), rewards)
