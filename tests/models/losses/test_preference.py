"""Preference losses of packed rows against TRL's trainers, which run their own forward on padded batches."""

import os
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch.func import grad, jvp, vmap

from fquant import jit, tree
from models import decoder, hf
from models.losses import preference
from tests.helpers.arrays import normal
from tests.helpers.peft_models import llama, shake

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL's imports

PROMPTS = ([5, 6, 7], [8, 9], [10, 11, 12, 13])
ANSWERS = ([20, 21], [22, 23, 24], [25, 26, 27, 28], [29], [30, 31, 32], [33, 34])  # chosen and rejected in turn
SEQUENCES = [(PROMPTS[i // 2], answer) for i, answer in enumerate(ANSWERS)]


def packed(sequences, length=24):
    """Return tokens, targets, segments, sequence numbers and whether a target is of an answer, each [n length]."""
    rows, row = [], []
    for i, (prompt, answer) in enumerate(sequences):
        ids = [*prompt, *answer]
        after = enumerate(zip(ids, [*ids[1:], -100], strict=True))
        piece = [(token, target, i, i, k + 1 >= len(prompt)) for k, (token, target) in after]
        if len(row) + len(piece) > length:
            rows, row = [*rows, row], []
        row = [*row, *piece]
    padded = [row + [(0, -100, -1, len(sequences), False)] * (length - len(row)) for row in [*rows, row]]
    columns = [[list(column) for column in zip(*row, strict=True)] for row in padded]
    return [torch.tensor(x) for x in zip(*columns, strict=True)]


def padded(sequences):
    """Return input_ids, attention_mask and completion_mask of one sequence a row, as TRL's collators make them."""
    most = max(len(p) + len(a) for p, a in sequences)
    fill = lambda values: torch.tensor([v + [0] * (most - len(v)) for v in values])
    ids = fill([[*p, *a] for p, a in sequences])
    attention = fill([[1] * len([*p, *a]) for p, a in sequences])
    return ids, attention, fill([[0] * len(p) + [1] * len(a) for p, a in sequences])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the policy and the reference of transformers, and the config and parameters of both here."""
    policy, reference = shake(llama(), lambda name: "proj" in name), llama()
    out = []
    for model in (policy, reference):
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        out.append(hf.load(folder))
    return policy, reference, out[0][0], out[0][1], out[1][1]


def trainer(cls, models, **attributes):
    """Return a trainer of TRL without its __init__, which wants datasets."""
    self = cls.__new__(cls)
    every = {"model": models[0], "ref_model": models[1], "args": SimpleNamespace(gradient_checkpointing_kwargs=None)}
    same = lambda x: x
    every["accelerator"] = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=same, gather=same)
    every |= {"aux_loss_enabled": False, "precompute_ref_logps": False, "_total_train_tokens": 0, "_tp_size": 1}
    every |= {"_metrics": defaultdict(lambda: defaultdict(list)), "is_encoder_decoder": False, "padding_value": 0}
    self.__dict__.update(every | attributes)
    return self


def fused(*models):
    """Give models of transformers TRL's fused head, once."""
    from trl.trainer.utils import add_fused_lm_head

    for model in models:
        if not getattr(model, "has_fused_head", False):
            add_fused_lm_head(model, outputs=("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"))
            model.has_fused_head = True


def check(theirs, models, loss):
    """Compare a loss and its gradient with respect to one weight."""
    policy, _, _, params, _ = models
    policy.zero_grad()
    theirs.backward()
    wanted = policy.model.layers[0].self_attn.q_proj.weight.grad
    value, found = loss(params), grad(loss)(params)
    torch.testing.assert_close(value, theirs.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.layers[0].q, wanted, rtol=1e-3, atol=1e-5)


def sums(params, cfg, sequences=SEQUENCES):
    tokens, targets, segments, numbers, answers = packed(sequences)
    losses = decoder.token_losses(params, tokens, torch.where(answers, targets, -100), cfg, segments=segments)
    return preference.log_probs(losses, numbers, len(sequences))


def lengths():
    _, targets, _, numbers, answers = packed(SEQUENCES)
    return preference.lengths(torch.where(answers, targets, -100), numbers, len(SEQUENCES))


def test_sequences_are_summed(models):
    """Compare with the log-probabilities of each sequence alone."""
    _, _, cfg, params, _ = models
    assert lengths().tolist() == [len(answer) for answer in ANSWERS]
    found = sums(params, cfg)
    for (prompt, answer), got in zip(SEQUENCES, found, strict=True):
        logits = decoder.forward(params, torch.tensor([*prompt, *answer]), cfg).log_softmax(-1)
        wanted = sum(logits[len(prompt) + i - 1, token] for i, token in enumerate(answer))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


DPO = [("sigmoid", 0.0), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.1), ("exo_pair", 1e-3), ("nca_pair", 0.0)]
DPO += [(kind, 0.0) for kind in ("bco_pair", "sppo_hard", "apo_zero", "apo_down", "sigmoid_norm", "robust")]


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("kind, smoothing", DPO)
def test_dpo_equals_trl(kind, smoothing, beta, models):
    """TRL's whole ``_compute_loss``, forward of both models included; its batch has all chosen sequences first."""
    from trl.trainer.dpo_trainer import DPOTrainer

    policy, reference, cfg, _, base = models
    fused(policy, reference)
    options = {"loss_types": [kind], "loss_weights": [1.0], "beta": beta, "label_smoothing": smoothing}
    options |= {"ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False}
    ids, mask, completion = padded([*SEQUENCES[0::2], *SEQUENCES[1::2]])
    inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": completion}
    theirs = DPOTrainer._compute_loss(trainer(DPOTrainer, models, **options), policy, inputs, False)
    ref = sums(base, cfg)
    check(theirs, models, lambda p: preference.dpo(sums(p, cfg), ref, beta, smoothing, kind, lengths()).mean())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_conservative_dpo_equals_trl(smoothing, models):
    """TRL has the smoothed sigmoid loss as AOT's, which for one pair is the same."""
    from trl.trainer.dpo_trainer import DPOTrainer

    policy, reference, cfg, _, base = models
    fused(policy, reference)
    options = {"loss_types": ["aot"], "loss_weights": [1.0], "beta": 0.3, "label_smoothing": smoothing}
    options |= {"ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False}
    ids, mask, completion = padded(SEQUENCES[:2])
    inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": completion}
    theirs = DPOTrainer._compute_loss(trainer(DPOTrainer, models, **options), policy, inputs, False)
    of = lambda p: sums(p, cfg, SEQUENCES[:2])
    check(theirs, models, lambda p: preference.dpo(of(p), of(base), 0.3, smoothing).mean())


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_orpo_equals_trl(beta, models):
    from trl.experimental.orpo import ORPOTrainer

    policy, _, cfg, _, _ = models
    batch = {}
    for name, some in (("chosen", SEQUENCES[0::2]), ("rejected", SEQUENCES[1::2])):
        ids, mask, completion = padded(some)
        batch |= {f"{name}_input_ids": ids, f"{name}_attention_mask": mask}
        batch[f"{name}_labels"] = torch.where(completion == 1, ids, -100)
    theirs, _ = trainer(ORPOTrainer, models, beta=beta).get_batch_loss_metrics(policy, batch)
    tokens, targets, segments, numbers, answers = packed(SEQUENCES)

    def loss(params):
        losses = decoder.token_losses(params, tokens, targets, cfg, segments=segments)
        chosen = (numbers % 2 == 0) & (numbers < len(SEQUENCES))
        nll = torch.where(chosen, losses, 0).sum() / (chosen & (targets != -100)).sum()
        policy = preference.log_probs(torch.where(answers, losses, 0), numbers, len(SEQUENCES))
        return nll + preference.orpo(policy, lengths(), beta).mean()

    check(theirs, models, loss)


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.3, 0.6)])
def test_kto_equals_trl(weights, kind, models):
    """Each answer has a label; the divergence is that of prompts with the answers of the next example."""
    from trl.trainer.kto_trainer import KTOTrainer

    policy, reference, cfg, _, base = models
    fused(policy, reference)
    labels = torch.tensor([True, False, True, True, False, False])
    mismatched = [(prompt, ANSWERS[(i + 1) % 6]) for i, (prompt, _) in enumerate(SEQUENCES)]
    inputs = {"label": labels}
    for prefix, some in (("", SEQUENCES), ("KL_", mismatched)):
        keys = (f"{prefix}input_ids", f"{prefix}attention_mask", f"{prefix}completion_mask")
        inputs |= dict(zip(keys, padded(some), strict=True))
    options = {"beta": 0.4, "loss_type": kind, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    self = trainer(KTOTrainer, models, calculate_KL=kind == "kto", **options)
    theirs = KTOTrainer._compute_loss(self, policy, inputs, False)
    ref, ref_mismatched = sums(base, cfg), sums(base, cfg, mismatched)

    def loss(params):
        divergence = preference.kto_divergence(sums(params, cfg, mismatched), ref_mismatched)
        return preference.kto(sums(params, cfg), ref, labels, divergence, 0.4, weights, kind).mean()

    check(theirs, models, loss)


def test_divergence_is_a_constant_of_at_least_zero():
    a, b = normal(6), normal(6, seed=1)
    assert (preference.kto_divergence(a - 5, b) == 0) and grad(lambda a: preference.kto_divergence(a, b))(a).eq(0).all()
    torch.testing.assert_close(preference.kto_divergence(a + 5, b, 12), (a + 5 - b).sum() / 12)


@pytest.mark.parametrize("x", [-1e-7, -1e-3, -0.6931, -0.6932, -3.0, -80.0])
def test_odds_near_one(x):
    """The odds ratio is exact for almost certain and for almost impossible sequences; so is its gradient."""
    loss = lambda t: preference.orpo(torch.stack([t, torch.full_like(t, -1.0)]), torch.ones(2), 1.0)[0]
    t = torch.tensor(x, dtype=torch.float64)
    odds = (t - torch.log(-torch.expm1(t))) - (-1 - torch.log(-torch.expm1(-torch.ones_like(t))))
    torch.testing.assert_close(loss(t), -torch.nn.functional.logsigmoid(odds))
    assert grad(loss)(t).isfinite() and grad(grad(loss))(t).isfinite()


def test_transforms(models):
    """Capture, vmap over examples, and a forward derivative of a step's loss."""
    _, _, cfg, params, base = models
    tokens, targets, segments, numbers, answers = packed(SEQUENCES)

    def loss(params, base, tokens, targets, segments, numbers):
        of = lambda p: decoder.token_losses(p, tokens, targets, cfg, segments=segments)
        policy, reference = (preference.log_probs(of(p), numbers, 6) for p in (params, base))
        return preference.dpo(policy, reference).sum()

    args = params, base, tokens, torch.where(answers, targets, -100), segments, numbers
    wanted = grad(loss)(*args)
    got = jit(lambda *args: grad(loss)(*args))(*args)
    torch.testing.assert_close(tree.leaves(got), tree.leaves(wanted), rtol=1e-4, atol=1e-6)
    one = lambda *rows: loss(params, base, *rows)
    torch.testing.assert_close(vmap(one)(*(t[None] for t in args[2:]))[0], loss(*args))
    slope = jvp(lambda p: loss(p, *args[1:]), (params,), (params,))[1]
    dot = sum((g * p).sum() for g, p in zip(tree.leaves(wanted), tree.leaves(params), strict=True))
    torch.testing.assert_close(slope, dot, rtol=1e-3, atol=1e-4)


def test_refusals():
    p = torch.zeros(4)
    for options, fault in (
        ({"kind": "dpo"}, "kind is 'dpo'; wanted one of sigmoid, hinge"),
        ({"smoothing": 0.5}, "smoothing is 0.5; wanted 0 <= smoothing < 0.5"),
        ({"smoothing": 0.1, "kind": "hinge"}, "smoothing is 0.1, which hinge has no use for"),
        ({"kind": "exo_pair"}, "smoothing is 0, and exo_pair takes its logarithm"),
        ({"kind": "ipo"}, "ipo needs the lengths of sequences; give preference.lengths"),
    ):
        with pytest.raises(ValueError, match=fault):
            preference.dpo(p, p, **options)
    with pytest.raises(ValueError, match=r"got log-probabilities \(3,\); wanted \[2 p\]"):
        preference.dpo(p[:3], p[:3])
    with pytest.raises(ValueError, match="kind is 'bco'; wanted kto or apo_zero_unpaired"):
        preference.kto(p, p, p > 0, 0.0, kind="bco")
    with pytest.raises(ValueError, match=r"got sequences \(3,\) beside tokens \(4,\)"):
        preference.log_probs(p, torch.zeros(3, dtype=torch.int64), 1)
