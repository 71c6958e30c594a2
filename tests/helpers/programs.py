"""Random programs: statements over tensors of many shapes, dtypes and layouts, as the text of a function.

A refused statement is left out. So are statements that no capture can have (values that decide the computation), and
reads of memory that was never written. A language lists the statements: TORCH those of torch, helpers/verbs.py ours.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

from fquant import jit, remat, tree
from tests.helpers.formats import alike

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
        t = a.clone(); t.masked_fill_(b > 0, -1) | t = a * 1; t.squeeze_() | t = a * 2; t.unsqueeze_(D) |
        t = a + 1; t.transpose_(0, -1) | t = a.detach(); t.unsqueeze_(0) | t = a.view(a.shape); t.squeeze_(D)""",
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


class Language(NamedTuple):
    """Statements by kind, how often a kind is drawn, of what shapes and dtypes tensors are, and what has which name.

    ``more`` are arguments beside the tensors, trees, and ``begin`` is the first statement of a program.
    """

    steps: Mapping[str, Any]
    often: Mapping[str, int]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    names: Mapping[str, Any]
    more: Mapping[str, Any] = {}
    begin: str = "pass"
    words: Mapping[str, tuple[str, ...]] = {}  # of which a statement has one at random for a word


TORCH = Language(STEPS, OFTEN, SHAPES, DTYPES, {"torch": torch, "F": F})


class Argument(NamedTuple):
    """Of what kind an argument is; its values are random."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: int

    def of(self, seed):
        t = (4 * torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))).to(self.dtype)
        return LAYOUTS[self.layout](t) if t.dim() and t.numel() else t


def statement(draw, known, name, language=TORCH):
    """The text of one, which makes ``name``, in terms of some of the tensors ``known``."""
    a = draw.choice(list(known)[-6:] if draw.random() < 0.6 else list(known))
    alike = [other for other in known if known[other].shape == known[a].shape]
    b, c = (draw.choice(alike if draw.random() < 0.7 else list(known)) for _ in range(2))
    steps = language.steps
    kind = draw.choice([kind for kind in steps for _ in range(language.often.get(kind, 1))])
    if isinstance(steps[kind], list):
        call = f"{'F' if kind == 'activation' else 'torch'}.{draw.choice(steps[kind])}"
        return f"{name} = {call}({a}, {b})" if kind == "two" else f"{name} = {call}({a})"
    at = draw.randrange(max(known[a].dim(), 1))
    size = known[a].shape[at] if known[a].dim() else 1
    names = {"a": a, "b": b, "c": c, "t": name, "D": str(at), "N": draw.choice(("0.5", "2", "-1", "1", "0", "3.7"))}
    names |= {"I": str(size // 2), "J": str(size - size // 2)}
    names |= {word: draw.choice(some) for word, some in language.words.items()}
    text = "".join(names.get(word, word) for word in re.split(r"\b", draw.choice(steps[kind].split("|")).strip()))
    return text if kind == "written" else f"{name} = {text}"


class Program(NamedTuple):
    """A function, as text, and what it is a function of: random tensors, and the rest of what its language has."""

    text: str
    arguments: list[Argument]
    language: Language

    @property
    def function(self):
        """The function itself."""
        made = dict(self.language.names)
        exec(self.text, made)
        return made["f"]

    @property
    def names(self):
        """Those of its arguments."""
        return [f"x{i}" for i in range(len(self.arguments))] + list(self.language.more)

    def values(self, seed):
        """Arguments, others for another seed; what is beside the tensors varies where it is all floats."""
        vary = lambda x: tree.map(lambda t: t * (1 + 0.1 * (seed % 7)), x) if _is_float(x) else x
        more = tuple(map(vary, self.language.more.values()))
        return tuple(kind.of(seed + j) for j, kind in enumerate(self.arguments)) + more


def program(draw, language=TORCH):
    """One of 3 to 40 statements, which returns a quarter of what it makes."""
    shape, known, lines = draw.choice(language.shapes), {}, []
    arguments = [
        Argument(
            shape if draw.random() < 0.7 else draw.choice(language.shapes),
            draw.choice(language.dtypes),
            draw.choice((0, 0, 1, 2, 3, 4)),
        )
        for _ in range(draw.randint(1, 4))
    ]
    known |= {f"x{i}": argument.of(i) for i, argument in enumerate(arguments)}
    names = {**language.names, **language.more}
    exec(language.begin, names)
    wanted = draw.choice((3, 6, 10, 20, 40))
    for _ in range(4 * wanted):
        name = f"v{len(lines)}"
        line, made = statement(draw, known, name, language), {**names, **known}
        try:
            exec(line, made)
        except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
            continue
        if isinstance(made[name], torch.Tensor) and made[name].numel() < 100_000:
            known[name] = made[name]
            lines.append(line)
        if len(lines) == wanted:
            break
    kept = [name for name in known if draw.random() < 0.25] or [list(known)[-1]]
    body = "".join(f"    {line}\n" for line in [language.begin, *lines])
    given = ", ".join([*(f"x{i}" for i in range(len(arguments))), *language.more])
    returned = ", ".join(f"'{name}': {name}" for name in kept)
    return Program(f"def f({given}):\n{body}    return {{{returned}}}\n", arguments, language)


def _is_float(x):
    return all(t.is_floating_point() for t in tree.leaves(x) if isinstance(t, torch.Tensor))


def _floats(xs):
    return tuple(i for i, x in enumerate(xs) if _is_float(x))


def _loss(f):
    def loss(*xs):
        made = sum((0.37 * t.double()).sum() for t in f(*xs).values() if t.is_floating_point())
        return made + 0.0 * sum(t.double().sum() for x in xs if _is_float(x) for t in tree.leaves(x))

    return loss


def _grad(f, xs):
    return grad(_loss(f), argnums=_floats(xs))(*xs)


def _twice(f, xs):
    first = lambda *ys: sum(t.double().square().sum() for t in tree.leaves(_grad(f, ys)))
    return grad(first, argnums=_floats(xs))(*xs)


def _jvp(f, xs):
    moving = _floats(xs)
    of = lambda *some: f(*(some[moving.index(i)] if i in moving else x for i, x in enumerate(xs)))
    given = tuple(xs[i] for i in moving)
    return jvp(of, given, tree.map(torch.ones_like, given))


def _vmap(f, xs):
    twice = lambda x: tree.map(lambda t: torch.stack([t, t + 1]), x)
    apart = [0 if isinstance(x, torch.Tensor) or _is_float(x) else None for x in xs]
    return vmap(f, tuple(apart))(*(x if dim is None else twice(x) for x, dim in zip(xs, apart, strict=True)))


def _descended(f, xs):
    slopes = _grad(f, xs)
    return tuple(tree.map(lambda t, g: t - 0.1 * g, xs[i], slope) for i, slope in zip(_floats(xs), slopes, strict=True))


WAYS = {  # what is captured of a function
    "itself": lambda f, xs: f(*xs),
    "grad": lambda f, xs: (_grad(f, xs), f(*xs)),
    "remat": lambda f, xs: grad(lambda *ys: remat(_loss(f))(*ys), argnums=_floats(xs))(*xs),
    "grad of grad": _twice,
    "jvp": lambda f, xs: _jvp(_loss(f), xs),
    "vmap": _vmap,
    "vmap of grad": lambda f, xs: _vmap(lambda *ys: _grad(f, ys), xs),
    "jvp of grad": lambda f, xs: _jvp(lambda *ys: _grad(f, ys), xs),
    "descent": _descended,
}
LIMITS = (  # of torch's tracer, which refuses what torch computes
    "got meta", "from meta", "devices",  # the zeros that are nowhere, of second derivatives
    "division by zero",  # the mean of no elements
    "expected scalar type",  # a product of no elements of two dtypes
    "two bool tensors",  # a softmax of no elements of bool
    "aten.mul.Scalar gives (torch.float64, torch.Size([])",  # a number times the zeros that are nowhere, of bool
    "through a batched product",  # a forward derivative, mapped
)  # fmt: skip


def refused(language, draw, passes=(), rank=0):
    """Why torch refuses a program; "" of one that, captured, is what it is, to the bit, on this rank.

    Raises AssertionError of any other.
    """
    made, (way, transformed) = program(draw, language), draw.choice(list(WAYS.items()))
    names = made.names
    space = {"g": lambda *xs: transformed(made.function, xs)}
    exec(f"def step({', '.join(names)}): return g({', '.join(names)})", space)
    donate = tuple(name for name in names if name != "base" and draw.random() < 0.5) if way == "descent" else ()
    options = {"fuse": draw.random() < 0.85, "recompute": draw.random() < 0.85, "passes": passes}
    eager, values = space["step"], lambda i: made.values(1000 * i + 100 * rank)
    told = f"{way} {options} donate={donate}\n{made.arguments}\n{made.text}"
    try:
        wanted = [tree.leaves(eager(*values(i))) for i in range(3)]
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        return f"torch itself refuses {way}: {str(error)[:60]}"
    captured = jit(eager, donate=donate, **options)
    try:
        captured(*values(0))
    except ValueError as error:
        assert "no result of this kind is left" in str(error) and donate, told
        captured = jit(eager, **options)
    except (RuntimeError, TypeError, ZeroDivisionError) as error:
        assert any(limit in str(error) for limit in LIMITS), f"{told}\n{error}"
        return f"torch traces no {way} of this: {str(error)[:60]}"
    before = []
    for i in range(3):
        given, kept = values(i), values(i)
        before.append(tree.leaves(captured(*given)))
        for got, right in list(zip(before, wanted, strict=False))[-1 if donate else 0 :]:  # earlier results stay
            assert all(map(alike, got, right)) and len(got) == len(right), told
        for name, x, y in zip(names, given, kept, strict=True):
            assert name in donate or all(map(alike, tree.leaves(x), tree.leaves(y))), f"{name} is changed by {told}"
    assert len(captured.traced) == 1, told
    return ""
