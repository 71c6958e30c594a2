"""Verbs in transforms of transforms: what a vjp returned is called when it has ended, inside of others; no examples."""

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

from fquant import linear, remat
from models.norm import rms_norm
from tests.helpers.verbs import VERBS

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, of empty tensors and the first use of forward mode

NAMES = {**VERBS.names, **VERBS.more}
exec(VERBS.begin, NAMES)
CALLS = """
    linear(t, base['nf4']) | linear(t, layers['nf4_dq']) | linear(t, dora['nf4']) | linear(t, dropped['int8']) |
    linear(t, base['dense']) | rms_norm(t, base['norm'], 1e-5) | rms_norm(t, t[0, 0], 1e-5) | gated(t, t.sin()) |
    heads(t, t.sin(), t.cos()) | turned(t) | head.cross_entropy(t, base['nf4'], codes(t)) |
    head.cross_entropy(t, t.reshape(6, 64).repeat(3, 1), codes(t)) | head.cross_entropy(t, layers['aq_3x8'], codes(t)) |
    random.dropout(t, 0.3, base['key']) | vq.apply(base['book'], t).x | vq.fsq.apply(base['fsq'], t).x |
    vq.lfq.apply(base['lfq'], t, base['key']).x | remat(block, 2)(t, layers['nf4'], base['norm']) |
    remat(block, 2)(t, t[0, 0].expand(64, 64), t[0, 0])"""
VERB = {text.strip(): eval(f"lambda t: {text.strip()}", NAMES) for text in CALLS.split("|")}
ONE_WEIGHT = [text for text in VERB if "t[0" not in text and "repeat" not in text]  # for all examples
X = torch.randn(2, 3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def waves(f):
    """A function of the shape of its argument, and as much of every verb's derivative as of the verb."""
    return lambda x: grad(lambda t: (f(t) * f(x)).sin().sum())(x)


@pytest.mark.each_value
@pytest.mark.parametrize("f", VERB.values(), ids=VERB)
@pytest.mark.parametrize("of", [lambda f: f, waves], ids=["itself", "its derivative"])
def test_a_vjp_is_differentiated_when_it_has_ended(f, of):
    inner = of(f)
    weights = inner(X).cos()
    pulled = lambda x: vjp(inner, x)[1](weights)[0]
    direct = grad(lambda x: (inner(x) * weights).sum())
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    close(grad(lambda x: pulled(x).sin().sum())(X), grad(lambda x: direct(x).sin().sum())(X))
    close(jvp(pulled, (X,), (X.sin(),))[1], jvp(direct, (X,), (X.sin(),))[1])
    close(grad(lambda x: remat(inner, 2)(x).sin().sum())(X), grad(lambda x: inner(x).sin().sum())(X))
    both = torch.stack([X, X.sin()])
    close(vmap(pulled)(both), torch.stack([pulled(x) for x in both]))


@pytest.mark.parametrize("text", [text for text in ONE_WEIGHT if "vq." not in text])
@pytest.mark.parametrize("where", [0, 1])
def test_no_examples(text, where):
    """As a rank may have. (Codebooks, and weights of an example's own, are a loop, which begins with the first.)"""
    f, some, none = VERB[text], X.movedim(0, where), X[:0].movedim(0, where)
    for g in (f, grad(lambda t: f(t).sin().sum())):
        got, one = vmap(g, where)(none), vmap(g, where)(some)
        assert got.shape == (0, *one.shape[1:]) and got.dtype == one.dtype
    assert grad(lambda x: vmap(f, where)(x).sin().sum())(none).shape == none.shape


@pytest.mark.parametrize("text", ONE_WEIGHT)
def test_no_tokens(text):
    f, none = VERB[text], X[:, :0]
    got, slope = f(none), grad(lambda t: f(t).sin().sum())(none)
    assert slope.shape == none.shape and got.dtype == slope.dtype == X.dtype


def test_tangents_of_a_norm_of_one_row_are_of_its_dtype():
    """torch gives the product of a tensor without dims and a number a tangent in float64."""
    x, w, scale = torch.randn(64), VERBS.more["base"]["dense"], VERBS.more["base"]["norm"]
    for f in (norm_and_linear, remat(norm_and_linear, 2)):
        once = lambda x, f=f: jvp(lambda x: f(x, w, scale), (x,), (x,))[1]
        assert once(x).dtype == jvp(once, (x,), (x,))[1].dtype == torch.float32


def norm_and_linear(x, w, scale):
    return linear(rms_norm(x, scale, 1e-5), w)
