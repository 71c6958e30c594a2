"""Distillation by chunks against TRL's GKD loss, ``F.kl_div`` and float64 of whole logits."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value, hessian, jvp, vmap

from fquant import NF4_DQ, jit, lora, quantize, random, tree
from fquant.lora import Lora
from fquant.packed_linear import linear
from models import decoder
from models.config import Config
from models.losses import distillation
from tests.helpers.arrays import normal
from tests.helpers.live_memory import Peak

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL's imports

VOCAB, DIM, WIDE = 11, 64, 6
X, Y = normal(2, 5, DIM) / 4, normal(2, 5, WIDE, seed=1)
HEAD, TEACHER = normal(VOCAB, DIM, seed=2) / 4, normal(VOCAB, WIDE, seed=3)
TARGETS = torch.tensor([[1, -100, 3, 0, 4], [3, 3, -100, -100, -100]])
PACKED = quantize(HEAD.float(), NF4_DQ)
ADAPTER = Lora(normal(3, DIM, seed=4) / 8, normal(VOCAB, 3, seed=5))
HEADS = {  # name: (what is trained, the head made of it)
    "dense": (HEAD, lambda w: w),
    "adapter on packed": (ADAPTER, lambda part: lora.attach({"h": PACKED}, {"h": part})["h"]),
    "merge-aware": (ADAPTER, lambda part: lora.attach({"h": PACKED}, {"h": part}, merge_aware=True)["h"]),
    "packed": (None, lambda _: PACKED),
}
OPTIONS = [(0.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.1, 2.5), (0.0, 3.0), (1.0, 0.5)]  # beta, temperature
CFG = Config(vocab=17, dim=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, hidden=64, max_positions=16)
CAPPED = Config(**{**CFG.__dict__, "final_cap": 2.0, "dim": 32, "tied": True})


def trl(x, head, beta, temperature, reduction="sum", targets=TARGETS):
    """TRL's loss of whole logits; a packed head is decoded by an exact product with the unit matrix."""
    from trl.experimental.gkd import GKDTrainer

    logits = linear(x, head)
    return GKDTrainer.generalized_jsd_loss(logits, Y @ TEACHER.T, targets, beta, temperature, reduction)


def ours(x, head, beta, temperature, chunk=3):
    return distillation.divergence(x, head, Y, TEACHER, TARGETS, beta, temperature, chunk)


def close(got, wanted):
    torch.testing.assert_close(tree.leaves(got), tree.leaves(wanted), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 10, None])
@pytest.mark.parametrize("beta, temperature", OPTIONS)
@pytest.mark.parametrize("name", HEADS)
def test_value_and_gradient_equal_trl(name, beta, temperature, chunk):
    part, made = HEADS[name]
    argnums = (0, 1) if part is not None else (0,)
    mine = lambda x, part: ours(x, made(part), beta, temperature, chunk).sum()
    theirs = lambda x, part: trl(x, made(part), beta, temperature)
    close(mine(X, part), theirs(X, part))
    close(grad_and_value(mine, argnums)(X, part), grad_and_value(theirs, argnums)(X, part))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_each_row_equals_kl_div(temperature):
    student, teacher = (F.log_softmax(z / temperature, -1) for z in (X @ HEAD.T, Y @ TEACHER.T))
    kept = torch.where(TARGETS != -100, 1, 0)
    of = lambda beta: ours(X, HEAD, beta, temperature)
    close(of(0.0), kept * F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1))
    close(of(1.0), kept * F.kl_div(teacher, student, reduction="none", log_target=True).sum(-1))
    mixed = (0.7 * student.exp() + 0.3 * teacher.exp()).log()
    parts = [F.kl_div(mixed, p, reduction="none", log_target=True).sum(-1) for p in (teacher, student)]
    close(of(0.3), kept * (0.3 * parts[0] + 0.7 * parts[1]))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", ["dense", "adapter on packed", "merge-aware"])
def test_transforms_equal_those_of_whole_logits(name, beta):
    part, made = HEADS[name]
    mine, theirs = (lambda x, part, f=f: f(x, made(part), beta, 1.5).sin().sum() for f in (ours, dense))
    tangents = tree.map(lambda t: normal(*t.shape, seed=7), (X, part))
    close(jvp(mine, (X, part), tangents), jvp(theirs, (X, part), tangents))
    along = lambda grads: sum((g * t).sum() for g, t in zip(tree.leaves(grads), tree.leaves(tangents), strict=True))
    dot = lambda f: lambda *args: along(grad(f, (0, 1))(*args))
    close(grad(dot(mine), (0, 1))(X, part), grad(dot(theirs), (0, 1))(X, part))
    close(jvp(grad(mine, (0, 1)), (X, part), tangents), jvp(grad(theirs, (0, 1)), (X, part), tangents))
    many = torch.stack([X, X.cos()])
    parts = tree.map(lambda t: torch.stack([t, t.sin()]), part)
    for dims, args in (((0, None), (many, part)), ((None, 0), (X, parts)), ((0, 0), (many, parts))):
        close(vmap(grad(mine, (0, 1)), dims)(*args), vmap(grad(theirs, (0, 1)), dims)(*args))


def dense(x, head, beta, temperature):
    """The definition, from whole logits in plain torch."""
    s, t = (F.log_softmax(z / temperature, -1) for z in (linear(x, head), Y @ TEACHER.T))
    kl = lambda p, q: (p.exp() * (p - q)).sum(-1)
    m = ((1 - beta) * s.exp() + beta * t.exp()).log()
    each = kl(t, s) if beta == 0 else kl(s, t) if beta == 1 else beta * kl(t, m) + (1 - beta) * kl(s, m)
    return torch.where(TARGETS != -100, each, 0)


def test_hessian():
    mine, theirs = (lambda x, f=f: f(x, HEAD, 0.3, 1.0).sum() for f in (ours, dense))
    close(hessian(mine)(X), hessian(theirs)(X))


def test_two_decoders():
    """A packed student of a wider teacher that caps its logits; packed rows; capture; one loss by any count."""
    student, teacher = (decoder.init(cfg, random.key(i), torch.float64) for i, cfg in enumerate((CFG, CAPPED)))
    base = tree.map_at(r"layers\.\d+\.(q|v|down)", lambda w: quantize(w.float(), NF4_DQ), student)
    adapters = lora.init(base, r"layers\.0\.(q|v)", 4, key=1, dtype=torch.float64)
    adapters = tree.map(lambda t: t + 0.1, adapters)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    targets, segments = tokens.roll(-1, 1).masked_fill(tokens == 5, -100), (tokens.cumsum(1) > 8).long()

    def loss(adapters, base, teacher, tokens, targets, segments, count=None):
        params = lora.attach(base, adapters)
        options = {"beta": 0.3, "temperature": 2.0, "segments": segments, "count": count}
        return distillation.loss(params, teacher, tokens, targets, CFG, CAPPED, **options)

    def whole(adapters, base, teacher, tokens, targets, segments):
        from trl.experimental.gkd import GKDTrainer

        logits = [
            decoder.forward(lora.attach(base, adapters), tokens, CFG, segments=segments),
            decoder.forward(teacher, tokens, CAPPED, segments=segments),
        ]
        return GKDTrainer.generalized_jsd_loss(*logits, targets, 0.3, 2.0)

    args = adapters, base, teacher, tokens, targets, segments
    torch.testing.assert_close(loss(*args), whole(*args), rtol=1e-6, atol=1e-8)
    found = grad(loss)(*args)
    torch.testing.assert_close(tree.leaves(found), tree.leaves(grad(whole)(*args)), rtol=1e-5, atol=1e-8)
    captured = jit(lambda *args: grad(loss)(*args))(*args)
    torch.testing.assert_close(tree.leaves(captured), tree.leaves(found), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(loss(*args, count=2.0) * 2, loss(*args) * (targets != -100).sum())


def test_memory_is_that_of_chunks():
    """The peak beside the arguments is far below whole logits of either model."""
    rows, vocab = 512, 4096
    x, y = normal(rows, 16, dtype=torch.float32), normal(rows, 8, dtype=torch.float32)
    head, teacher = (normal(vocab, d, dtype=torch.float32) for d in (16, 8))
    targets = torch.zeros(rows, dtype=torch.int64)
    with Peak() as live:
        grad(lambda x: distillation.divergence(x, head, y, teacher, targets, 0.5, chunk=16).sum())(x)
    assert live.most < rows * vocab * 4 / 2, live.most


def test_refusals():
    f = distillation.divergence
    for args, fault in (
        ((X, HEAD, Y, TEACHER, TARGETS, 1.5), "beta is 1.5; wanted 0"),
        ((X, HEAD, Y, TEACHER, TARGETS, 0.5, 0.0), "temperature is 0.0; wanted more than 0"),
        ((X, HEAD, Y, TEACHER, TARGETS, 0.5, 1.0, 0), "chunk is 0; wanted at least 1 row"),
        ((X, HEAD, Y, TEACHER[:9], TARGETS), "the student has a vocabulary of 11 and the teacher of 9; distil between"),
        ((X, HEAD, Y[:1], TEACHER, TARGETS), r"targets: shape \(2, 5\), want the teacher's \(1, 5\)"),
    ):
        with pytest.raises(ValueError, match=fault):
            f(*args)
