"""Programs of numerical methods: integrators, solvers, transport, derivatives of derivatives.

Each function takes a size and returns a function of trees of tensors with its arguments.
"""

import torch
from torch.func import grad, grad_and_value, jvp, vjp, vmap


def _field(params, t, x):
    h = torch.tanh(x @ params["in"] + t * params["time"])
    return torch.tanh(h @ params["mid"]) @ params["out"]


def _field_params(dim: int, hidden: int):
    params = {"in": torch.randn(dim, hidden) / dim**0.5, "time": torch.randn(hidden)}
    return params | {"mid": torch.randn(hidden, hidden) / hidden**0.5, "out": torch.randn(hidden, dim) / hidden**0.5}


def runge_kutta(size: int):
    """Gradients through 16 steps of the classical method on a neural field (Chen et al. 2018)."""

    def loss(params, x, y):
        h = 1 / 16
        for i in range(16):
            t = i * h
            k1 = _field(params, t, x)
            k2 = _field(params, t + h / 2, x + h / 2 * k1)
            k3 = _field(params, t + h / 2, x + h / 2 * k2)
            k4 = _field(params, t + h, x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return ((x - y) ** 2).mean()

    return grad_and_value(loss), (_field_params(32, 64), torch.randn(size, 32), torch.randn(size, 32))


def sinkhorn(size: int):
    """Gradients of regularised transport between two clouds, 30 iterations on logarithms (Cuturi 2013)."""

    def cost(x, y):
        distance = ((x[:, None] - y[None]) ** 2).sum(-1)
        scores, f = -distance / 0.5, torch.zeros(len(x), 1)
        for _ in range(30):
            g = -torch.logsumexp(scores + f, dim=0, keepdim=True)
            f = -torch.logsumexp(scores + g, dim=1, keepdim=True)
        return (torch.exp(scores + f + g) * distance).sum() / len(x)

    return grad_and_value(cost), (torch.randn(size, 8), torch.randn(size, 8) + 1)


def newton(size: int):
    """A step of Newton's method by conjugate gradients on products with the Hessian (Martens 2010)."""

    def loss(params, x, y):
        h = torch.tanh(x @ params["w"])
        return ((h @ params["v"] - y) ** 2).mean() + 1e-2 * sum((p**2).sum() for p in params.values())

    def step(params, x, y):
        gradient = lambda p: grad(loss)(p, x, y)
        dot = lambda a, b: sum((a[k] * b[k]).sum() for k in a)
        r = {k: -g for k, g in gradient(params).items()}
        d, move = r, {k: torch.zeros_like(g) for k, g in r.items()}
        for _ in range(8):
            product = jvp(gradient, (params,), (d,))[1]
            rate = dot(r, r) / (dot(d, product) + 1e-6)
            move = {k: move[k] + rate * d[k] for k in d}
            after = {k: r[k] - rate * product[k] for k in r}
            turn = dot(after, after) / (dot(r, r) + 1e-12)
            r, d = after, {k: after[k] + turn * d[k] for k in d}
        return {k: params[k] + move[k] for k in params}

    params = {"w": torch.randn(64, 128) / 8, "v": torch.randn(128, 1) / 11}
    return step, (params, torch.randn(size, 64), torch.randn(size, 1))


def equilibrium(size: int):
    """Gradients at a fixed point, by a series of products with its Jacobian (Bai et al. 2019)."""

    def layer(params, z, x):
        return torch.tanh(z @ params["w"] + x @ params["u"] + params["b"])

    def step(params, x, y):
        z = torch.zeros_like(x)
        for _ in range(20):
            z = layer(params, z, x)
        dz = 2 * (z - y) / z.numel()
        pull = vjp(lambda z: layer(params, z, x), z)[1]
        total, term = dz, dz
        for _ in range(12):
            (term,) = pull(term)
            total = total + term
        pull = vjp(lambda p: layer(p, z, x), params)[1]
        return pull(total)[0], z

    params = {"w": torch.randn(128, 128) / 30, "u": torch.randn(128, 128) / 11, "b": torch.zeros(128)}
    return step, (params, torch.randn(size, 128), torch.randn(size, 128))


def burgers(size: int):
    """Gradients of the residual of Burgers' equation, with second derivatives in space (Raissi et al. 2019)."""

    def network(params, t, x):
        h = torch.stack([t, x])
        for w, b in params[:-1]:
            h = torch.tanh(h @ w + b)
        w, b = params[-1]
        return (h @ w + b).squeeze()

    def residual(params, t, x):
        u = network(params, t, x)
        du_t, du_x = grad(network, argnums=(1, 2))(params, t, x)
        du_xx = grad(grad(network, argnums=2), argnums=2)(params, t, x)
        return du_t + u * du_x - 0.01 / torch.pi * du_xx

    def loss(params, t, x):
        return (vmap(residual, in_dims=(None, 0, 0))(params, t, x) ** 2).mean()

    dims = (2, 64, 64, 64, 1)
    params = [(torch.randn(i, o) / i**0.5, torch.zeros(o)) for i, o in zip(dims, dims[1:], strict=False)]
    return grad_and_value(loss), (params, torch.rand(size), torch.rand(size) * 2 - 1)


def gaussian_process(size: int):
    """Gradients of the marginal likelihood of a Gaussian process (Rasmussen & Williams 2006)."""

    def loss(params, x, y):
        scaled = x / params["length"].exp()
        square = ((scaled[:, None] - scaled[None]) ** 2).sum(-1)
        noise = params["noise"].exp() + 1e-4
        kernel = params["scale"].exp() * torch.exp(-square / 2) + noise * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        solved = torch.cholesky_solve(y[:, None], factor).squeeze(-1)
        return 0.5 * (y @ solved) + factor.diagonal().log().sum()

    params = {"length": torch.zeros(8), "scale": torch.zeros(()), "noise": torch.full((), -2.0)}
    return grad_and_value(loss), (params, torch.randn(size, 8), torch.randn(size))
