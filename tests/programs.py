"""Random programs: statements of torch over tensors of many shapes, dtypes and layouts, as the text of a function.

A statement that torch refuses is left out. So is what no capture can have (values that decide what is computed), and
memory that nobody wrote.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

from fquant import remat

STEPS = {  # a, b, c: tensors; D: a dim of a; N: a number; I, J: places in D
    "elementwise": """neg exp tanh sigmoid relu abs sign square reciprocal cos floor erf log1p sqrt rsqrt trunc round
        expm1 atan asinh isnan logical_not frac positive""".split(),
    "activation": "silu gelu softplus leaky_relu elu celu hardtanh logsigmoid hardswish selu softsign".split(),
    "two": """add sub mul div maximum minimum atan2 fmod remainder hypot logaddexp copysign eq lt xlogy""".split(),
    "more": """
        torch.where(a > b, a, c) | torch.where(a > 0, b, N) | torch.addcmul(a, b, c, value=N) | torch.lerp(a, b, c) |
        a.clamp(-1, 0.5) | a.masked_fill(b > 0, N) | N - a | N / (a + 3) | a * N | a + N | a ** 2 | a ** 3 |
        torch.add(a, b, alpha=N) | torch.sub(a, b, alpha=2) | a.to(b.dtype) | torch.zeros_like(a) |
        torch.full_like(a, N) | a.bfloat16() | a.half() | a.float() | a.double() |
        torch.arange(a.numel()).view(a.shape) * b | a.clamp_min(b)""",
    "view": """
        a.transpose(0, D) | a.flatten() | a.reshape(a.shape[::-1]) | a.unsqueeze(D) | a.squeeze() | a.T | a.mT |
        a[None] | a.unsqueeze(D).expand(*a.shape[:D], 2, *a.shape[D:]) | a.narrow(D, I, J) | a.select(D, I) | a[::2] |
        a.diagonal() | a.flip(D) | a.roll(1, D) | a.contiguous() | a.clone() | a.expand_as(b) | a.movedim(0, -1) |
        a.unfold(D, 2, 1) | a.chunk(2, D)[-1] | a.unbind(D)[0] | a.as_strided((2, 2), (1, 2)) | a.detach() |
        a.view(a.shape) | a.expand(2, *a.shape) | a.swapaxes(0, -1).contiguous().swapaxes(0, -1) |
        a.view(torch.int16).view(a.dtype) | a.permute(*range(a.dim())[::-1])""",
    "moved": """
        torch.cat([a, b], D) | torch.stack([a, b, a]) | F.pad(a, (1, 1)) | F.pad(a, (-1, 2), value=3.0) | a.tril() |
        a.repeat_interleave(2, D) | a.index_select(D, torch.arange(a.shape[D]).flip(0)) | a.sort(D).values |
        a.cumsum(D) | a.gather(D, b.argsort(D)) | a.scatter_add(D, b.argsort(D), c) | a.topk(1, D).values |
        a[b.argsort(0).flatten()[:2]]""",
    "reduced": """
        a.sum(D) | a.mean(D, keepdim=True) | a.amax(D) | a.var(D) | a.logsumexp(D) | a.norm() | a.prod(D) | a.any(D) |
        F.softmax(a, D) | F.log_softmax(a, D) | F.layer_norm(a, a.shape[-1:]) | F.rms_norm(a, a.shape[-1:]) |
        a.argmax(D) | a - a.mean(D, keepdim=True) | a * b.sum() | F.softmax(a, D, dtype=torch.float32) |
        a.sum(D, dtype=torch.float64) | F.mse_loss(a, b) | F.smooth_l1_loss(a, b) |
        F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1)) | a.max(D).values""",
    "product": """
        a @ b.mT | a @ b | torch.einsum('...i,...j->...ij', a, b) | F.linear(a, b) | torch.addmm(a, b, b.mT) |
        torch.bmm(a, b.mT) | torch.mv(a, b[0]) | torch.outer(a.flatten()[:3], b.flatten()[:4]) |
        torch.kron(a[:1], b[:1]) | F.scaled_dot_product_attention(a[None], b[None], c[None])""",
    "written": """
        t = a.clone(); t.add_(b) | t = a.clone(); t[:1].mul_(2) | t = a * 1; t[..., :1].copy_(b[..., :1]) |
        t = torch.zeros_like(a); t.copy_(b) | t = a + 0; t.T.sub_(1) | t = torch.empty_like(a); t.fill_(3.0) |
        t = a.clone(); t.mul_(2).add_(b) | t = a.clone(); t.flatten()[::2].neg_() |
        t = a.clone(); t.sigmoid_().mul_(a) | t = a.contiguous().clone(); t.view(-1)[1:].sub_(a.reshape(-1)[:-1]) |
        t = a.clone(); t.masked_fill_(b > 0, -1)""",
}  # fmt: skip
OFTEN = {"elementwise": 3, "two": 5, "more": 4, "view": 3, "written": 2}
SHAPES = ((4, 6), (6, 4), (4, 4), (3, 4, 6), (6,), (2, 3, 4, 4), (1, 6), (4, 1), (), (5, 64), (64, 33), (0, 4))
DTYPES = (torch.float32,) * 6 + (torch.bfloat16, torch.float16, torch.float64, torch.int64)
LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t,
    lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    lambda t: torch.stack([t, t], -1)[..., 0],
    lambda t: torch.cat([t[:1], t])[1:],
    lambda t: t[:1].expand(t.shape),
)
NAMES = {"torch": torch, "F": F}


class Argument(NamedTuple):
    """Of what kind an argument is; its values are random."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: int

    def of(self, seed):
        t = (4 * torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))).to(self.dtype)
        return LAYOUTS[self.layout](t) if t.dim() and t.numel() else t


def statement(draw, known, name):
    """The text of one, which makes ``name``, in terms of some of the tensors ``known``."""
    a = draw.choice(list(known)[-6:] if draw.random() < 0.6 else list(known))
    alike = [other for other in known if known[other].shape == known[a].shape]
    b, c = (draw.choice(alike if draw.random() < 0.7 else list(known)) for _ in range(2))
    kind = draw.choice([kind for kind in STEPS for _ in range(OFTEN.get(kind, 1))])
    if isinstance(STEPS[kind], list):
        call = f"{'F' if kind == 'activation' else 'torch'}.{draw.choice(STEPS[kind])}"
        return f"{name} = {call}({a}, {b})" if kind == "two" else f"{name} = {call}({a})"
    at = draw.randrange(max(known[a].dim(), 1))
    size = known[a].shape[at] if known[a].dim() else 1
    names = {"a": a, "b": b, "c": c, "t": name, "D": str(at), "N": draw.choice(("0.5", "2", "-1", "1", "0", "3.7"))}
    names |= {"I": str(size // 2), "J": str(size - size // 2)}
    text = "".join(names.get(word, word) for word in re.split(r"\b", draw.choice(STEPS[kind].split("|")).strip()))
    return text if kind == "written" else f"{name} = {text}"


class Program(NamedTuple):
    """A function, as text, and what it is a function of."""

    text: str
    arguments: list[Argument]

    @property
    def function(self):
        """The function itself."""
        made = dict(NAMES)
        exec(self.text, made)
        return made["f"]


def program(draw):
    """One of 3 to 40 statements, which returns a quarter of what it makes."""
    shape, known, lines = draw.choice(SHAPES), {}, []
    arguments = [
        Argument(
            shape if draw.random() < 0.7 else draw.choice(SHAPES), draw.choice(DTYPES), draw.choice((0, 0, 1, 2, 3, 4))
        )
        for _ in range(draw.randint(1, 4))
    ]
    known |= {f"x{i}": argument.of(i) for i, argument in enumerate(arguments)}
    wanted = draw.choice((3, 6, 10, 20, 40))
    for _ in range(4 * wanted):
        name = f"v{len(lines)}"
        line, made = statement(draw, known, name), dict(known)
        try:
            exec(line, NAMES, made)
        except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
            continue
        if isinstance(made[name], torch.Tensor) and made[name].numel() < 100_000:
            known[name] = made[name]
            lines.append(line)
        if len(lines) == wanted:
            break
    kept = [name for name in known if draw.random() < 0.25] or [list(known)[-1]]
    body = "".join(f"    {line}\n" for line in lines)
    given = ", ".join(f"x{i}" for i in range(len(arguments)))
    returned = ", ".join(f"'{name}': {name}" for name in kept)
    return Program(f"def f({given}):\n{body}    return {{{returned}}}\n", arguments)


def _loss(f):
    def loss(*xs):
        made = sum((0.37 * t.double()).sum() for t in f(*xs).values() if t.is_floating_point())
        return made + 0.0 * sum(x.double().sum() for x in xs)

    return loss


def _floats(xs):
    return tuple(i for i, x in enumerate(xs) if x.is_floating_point())


def _twice(f, xs):
    first = lambda *ys: sum(t.double().square().sum() for t in grad(_loss(f), argnums=_floats(xs))(*ys))
    return grad(first, argnums=_floats(xs))(*xs)


WAYS = {  # what is captured of a function
    "itself": lambda f, xs: f(*xs),
    "grad": lambda f, xs: (grad(_loss(f), argnums=_floats(xs))(*xs), f(*xs)),
    "remat": lambda f, xs: grad(lambda *ys: remat(_loss(f))(*ys), argnums=_floats(xs))(*xs),
    "grad of grad": _twice,
    "jvp": lambda f, xs: jvp(_loss(f), xs, tuple(map(torch.ones_like, xs))),
    "vmap": lambda f, xs: vmap(f)(*(torch.stack([x, x + 1]) for x in xs)),
    "vmap of grad": lambda f, xs: vmap(grad(_loss(f), argnums=_floats(xs)))(*(torch.stack([x, x + 1]) for x in xs)),
    "descent": lambda f, xs: tuple(
        x - 0.1 * g for x, g in zip(xs, grad(_loss(f), argnums=_floats(xs))(*xs), strict=False)
    ),
}
