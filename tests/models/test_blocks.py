"""Decoder blocks against their formulas in float64 and transformers, through every transform; packed documents."""

import dataclasses
import math

import pytest
import torch
import transformers
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from models import blocks
from models.config import Config, RopeScaling
from models.hf.config import to_hf
from models.norm import rms_norm
from models.rope import rope, rotate
from tests.helpers.arrays import normal
from tests.helpers.cases import slow_after
from tests.helpers.formats import forced

CFG = Config(vocab=32, dim=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=6, hidden=24, max_positions=512)
SCALINGS = {
    "none": None,
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_transformers(dtype):
    theirs = LlamaRMSNorm(16, 1e-5).to(dtype)
    theirs.weight.data = 1 + normal(16, seed=1, dtype=dtype)
    x, wanted = normal(3, 5, 16, dtype=dtype), theirs(normal(3, 5, 16, dtype=dtype)).detach()
    with forced("reference"):
        assert torch.equal(rms_norm(x, theirs.weight.data, 1e-5), wanted)
    # Another order of the same sum moves the scale by a unit in the last place of float32.
    got = rms_norm(x, theirs.weight.data, 1e-5)
    torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(torch.float32).eps, atol=0)


def test_rms_norm_formula():
    x, weight = normal(3, 5, 16), normal(16, seed=1)
    got = rms_norm(x, weight, 1e-5)
    for token, out in zip(x.flatten(0, 1), got.flatten(0, 1), strict=True):
        mean = sum(float(v) ** 2 for v in token) / 16
        wanted = [float(v * w) / math.sqrt(mean + 1e-5) for v, w in zip(token, weight, strict=True)]
        torch.testing.assert_close(out, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_is_transformers(name):
    cfg = dataclasses.replace(CFG, head_dim=32, rope_theta=5e5, rope_scaling=SCALINGS[name])
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**to_hf(cfg)))
    places = torch.arange(200)[None]
    x = normal(1, 200, 3, 32, dtype=torch.float32)
    cos, sin = rope(places, cfg)
    wanted_cos, wanted_sin = theirs(x, places)
    torch.testing.assert_close(cos, wanted_cos, rtol=0, atol=2e-5)
    torch.testing.assert_close(sin, wanted_sin, rtol=0, atol=2e-5)
    wanted, _ = apply_rotary_pos_emb(x, x, wanted_cos, wanted_sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x, cos, sin), wanted, rtol=0, atol=1e-4)


def test_runs_and_positions():
    segments = torch.tensor([5, 5, 2, 2, 2, 5, 0])  # a number that comes back is another document
    runs = blocks.runs(segments, segments)
    assert runs.tolist() == [0, 0, 1, 1, 1, 2, 3]
    assert blocks.positions(segments, runs).tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert blocks.positions(segments).tolist() == list(range(7))
    both = torch.stack([segments, torch.zeros_like(segments)])
    mapped = vmap(blocks.runs)(both, both)
    assert mapped.tolist() == [runs.tolist(), [0] * 7] and torch.equal(mapped, blocks.runs(both, both))
    places = vmap(blocks.positions)(both, mapped)
    assert places.tolist() == [[0, 1, 0, 1, 2, 0, 0], list(range(7))]
    assert torch.equal(places, blocks.positions(both, mapped))
    with pytest.raises(ValueError, match=r"segments: shape \(6,\), want the tokens' \(7,\)"):
        blocks.runs(segments, segments[1:])


def test_cross_entropy():
    logits, targets = normal(2, 5, 11), torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))
    targets[0, 2] = targets[1, 4] = blocks.IGNORE
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(blocks.cross_entropy(logits, targets), mean)
    torch.testing.assert_close(blocks.cross_entropy(logits, targets, count=20), mean * 8 / 20)
    torch.testing.assert_close(blocks.cross_entropy(logits, targets, count=torch.tensor(20)), mean * 8 / 20)
    ignored = torch.full_like(targets, blocks.IGNORE)
    assert blocks.cross_entropy(logits, ignored) == 0
    assert not grad(blocks.cross_entropy)(logits, ignored).any()
    assert blocks.cross_entropy(logits.bfloat16(), targets).dtype is torch.float32
    with pytest.raises(ValueError, match=r"targets: shape \(2, 4\), want the logits' \(2, 5\)"):
        blocks.cross_entropy(logits, targets[:, 1:])
    with pytest.raises(TypeError, match=r"targets: torch.float64, want int64 or int32; use targets.long\(\)"):
        blocks.cross_entropy(logits, targets.double())
    with pytest.raises(ValueError, match="targets: on meta, want the logits' device cpu"):
        blocks.cross_entropy(logits, targets.to("meta"))
    with pytest.raises(IndexError, match=r"targets: 11 at \[1, 0\], want 0 to 10, or -100 to ignore it"):
        blocks.cross_entropy(logits, torch.where(torch.arange(10).view(2, 5) == 5, 11, targets))


# Every block as a scalar function of its float arguments; the rest is fixed. "batched" arguments have [b ...].
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2], [3, 3, 3, 3, 3]])
RUNS = blocks.runs(SEGMENTS, SEGMENTS)
TARGETS = torch.tensor([[1, 2, -100, 0, 4], [3, 3, 3, 3, 3], [-100, 0, 1, 2, 3]])
ANGLES = rope(blocks.positions(SEGMENTS, RUNS), CFG)


def norms(x, weight):
    """Apply the norm to ``x [t d]``, or to several, each with its own weight."""
    each = lambda x, weight: rms_norm(x, weight, 1e-5)
    return each(x, weight) if weight.ndim == 1 else torch.stack(list(map(each, x, weight)))


VERBS = {
    "rms_norm": (norms, (normal(3, 5, 8), normal(3, 8, seed=1)), ()),
    "rotate": (rotate, (normal(3, 5, 1, 6),), ANGLES),
    "swiglu": (blocks.swiglu, (normal(3, 5, 8), normal(3, 5, 8, seed=1)), ()),
    "cross_entropy": (blocks.cross_entropy, (normal(3, 5, 6),), (TARGETS,)),
}


@pytest.mark.parametrize("name", slow_after(1, VERBS))
def test_transforms(name):
    verb, floats, fixed = VERBS[name]

    def scalar(*args):
        return verb(*args).sin().sum()

    args = floats + fixed
    where = tuple(range(len(floats)))
    # Derivatives of first and second order, in reverse and forward mode, against finite differences in float64.
    tracked = tuple(x.clone().requires_grad_() for x in floats)
    assert torch.autograd.gradcheck(lambda *x: verb(*x, *fixed), tracked, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *x: verb(*x, *fixed), tracked, check_fwd_over_rev=True)
    # vmap is the loop.
    loop = torch.stack([verb(*one) for one in zip(*args, strict=True)])
    torch.testing.assert_close(vmap(verb)(*args), loop)
    each = [grad(scalar, where)(*one) for one in zip(*args, strict=True)]
    each = [torch.stack(parts) for parts in zip(*each, strict=True)]
    torch.testing.assert_close(list(vmap(grad(scalar, where))(*args)), each)
    # grad of grad and jvp of torch.func agree with one another, and capture with both.
    tangents = tuple(normal(*x.shape, seed=7) for x in floats)

    def along(*args):
        return jvp(lambda *x: scalar(*x, *args[len(floats) :]), args[: len(floats)], tangents)[1]

    def inner(*args):
        grads = grad(scalar, where)(*args)
        return sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))

    torch.testing.assert_close(along(*args), inner(*args))
    twice = grad(inner, where)
    torch.testing.assert_close(twice(*args), grad(along, where)(*args))

    def hessian_product(*args):
        return grad(inner_of, where)(*args)

    def inner_of(*args):
        split = len(floats)
        grads = grad(scalar, where)(*args[:-split])
        return sum((g * t).sum() for g, t in zip(grads, args[-split:], strict=True))

    captured = make_fx(hessian_product, tracing_mode="fake")(*args, *tangents)
    torch.testing.assert_close(captured(*args, *tangents), twice(*args))
