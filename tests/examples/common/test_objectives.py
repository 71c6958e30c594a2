"""examples.common.objectives: losses of preferences against TRL's formulas on logits, and rows against naive loops."""

import math

import pytest
import torch

from examples.common import objectives
from examples.common.objectives import Objective
from examples.data.dataset import IGNORED, Preferences, Rows
from fquant import lora, random, tree
from fquant.communication import LOCAL
from models import decoder
from tests.helpers.hf_models import GQA, random_params

WIDTH = 12
DOCUMENTS = [  # prompt and answer
    ([5, 6, 7], [8, 9]), ([5], [10, 11, 12, 13]), ([20, 21, 22, 23], [24]),
    ([30, 31], [32, 33, 34, 35, 36, 37, 38, 39]),
]  # fmt: skip


def rows(documents, width=WIDTH):
    """The rows of examples.data: a document each, cut or padded, targets one position earlier."""
    tokens = torch.zeros(len(documents), width, dtype=torch.int64)
    targets, segments = torch.full_like(tokens, IGNORED), torch.ones_like(tokens)
    for i, (prompt, answer) in enumerate(documents):
        whole = (prompt + answer)[: width + 1]
        tokens[i, : len(whole)] = torch.tensor(whole[:width])
        segments[i, : len(whole)] = 0
        for at in range(len(prompt), len(whole)):
            targets[i, at - 1] = whole[at]
    return Rows(tokens, targets, segments)


def equal(a, b):
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


@pytest.mark.parametrize("width", [16, WIDTH, 9, 6])
def test_mismatched(width):
    """Prompts with the answer of the row before, as get_kl_completion_ids of TRL cycles them."""
    given = [(prompt, (prompt + answer)[: width + 1][len(prompt) :]) for prompt, answer in DOCUMENTS]
    cycled = [answer for _, answer in given[-1:] + given[:-1]]
    wanted = rows([(prompt, answer) for (prompt, _), answer in zip(given, cycled, strict=True)], width)
    found = objectives.mismatched(rows(DOCUMENTS, width))
    assert torch.equal(found.targets, wanted.targets) and torch.equal(found.segments, wanted.segments)
    assert torch.equal(found.tokens, wanted.tokens)


@pytest.mark.parametrize("width", [16, 6])
def test_whole_targets(width):
    found = objectives.whole(rows(DOCUMENTS, width))
    for i, (prompt, answer) in enumerate(DOCUMENTS):
        text = prompt + answer
        wanted = [text[j + 1] if j + 1 < min(len(text), width + 1) else IGNORED for j in range(width)]
        assert found[i].tolist() == wanted


@pytest.fixture(scope="module")
def model():
    params = random_params(GQA)
    adapters = lora.init(params, r"layers\.\d+\.(q|v|down)", rank=4, alpha=8, key=0)
    noise = lambda path, t: t + 0.05 * random.normal(random.fold(random.key(1), path), tuple(t.shape))
    return params, lora.attach(params, tree.map_with_path(noise, adapters))


def log_probs(params, documents, prompts=False):
    """The summed log-probabilities of answers, or of all tokens but the first, and their numbers, from logits."""
    found = []
    for prompt, answer in documents:
        text = torch.tensor(prompt + answer)
        logits = decoder.forward(params, text[None], GQA)[0].log_softmax(-1)
        first = 1 if prompts else len(prompt)
        found.append((sum(logits[i - 1, text[i]] for i in range(first, len(text))), len(text) - first))
    return torch.stack([x for x, _ in found]), torch.tensor([float(n) for _, n in found])


def loss(objective, model, batch):
    base, policy = model
    batch = objectives.complete(objective, batch)
    count = objectives.counts(objective, batch)
    return objectives.loss(objective, policy, base, batch, count, GQA, LOCAL, torch.float32)


PAIRS = Preferences(rows(DOCUMENTS[:2]), rows([(DOCUMENTS[0][0], [40]), (DOCUMENTS[1][0], [41, 42, 43])]))
REJECTED = [(DOCUMENTS[0][0], [40]), (DOCUMENTS[1][0], [41, 42, 43])]


def ratios(model):
    base, policy = model
    both = (DOCUMENTS[:2], REJECTED)
    return [log_probs(policy, documents)[0] - log_probs(base, documents)[0] for documents in both]


def test_dpo(model):
    """TRL: -logsigmoid(beta (log-ratio of chosen - that of rejected)), and IPO's square over tokens."""
    chosen, rejected = ratios(model)
    wanted = -torch.nn.functional.logsigmoid(0.3 * (chosen - rejected)).mean()
    torch.testing.assert_close(loss(Objective("dpo", beta=0.3), model, PAIRS), wanted, atol=1e-5, rtol=1e-5)
    lengths = [log_probs(model[0], documents)[1] for documents in (DOCUMENTS[:2], REJECTED)]
    wanted = ((chosen / lengths[0] - rejected / lengths[1] - 1 / 0.6) ** 2).mean()
    torch.testing.assert_close(loss(Objective("dpo", "ipo", 0.3), model, PAIRS), wanted, atol=1e-5, rtol=1e-5)


def test_orpo(model):
    policy = model[1]
    (chosen, n), (rejected, m) = log_probs(policy, DOCUMENTS[:2]), log_probs(policy, REJECTED)
    chosen, rejected = chosen / n, rejected / m
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    likelihood, count = log_probs(policy, DOCUMENTS[:2], prompts=True)
    wanted = -likelihood.sum() / count.sum() - 0.2 * torch.nn.functional.logsigmoid(odds).mean()
    torch.testing.assert_close(loss(Objective("orpo", beta=0.2), model, PAIRS), wanted, atol=1e-5, rtol=1e-5)


def test_kto(model):
    base, policy = model
    ratio = log_probs(policy, DOCUMENTS)[0] - log_probs(base, DOCUMENTS)[0]
    cycled = [(DOCUMENTS[i][0], DOCUMENTS[i - 1][1]) for i in range(4)]
    divergence = (log_probs(policy, cycled)[0] - log_probs(base, cycled)[0]).mean().clamp(min=0)
    labels = torch.tensor([True, False, False, True])
    sign = torch.where(labels, 1.0, -1.0)
    each = 1 - torch.sigmoid(0.5 * sign * (ratio - divergence))
    wanted = (torch.where(labels, 2.0, 1.0) * each).mean()
    objective = Objective("kto", beta=0.5, weights=(2.0, 1.0))
    found = loss(objective, model, Preferences(rows(DOCUMENTS, 16), None, labels))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_is_right(model):
    base, policy = model
    options = GQA, LOCAL, torch.float32
    chosen, rejected = ratios(model)
    found = objectives.num_right(Objective("dpo"), policy, base, PAIRS, *options)
    assert int(found) == int((chosen > rejected).sum())
    swapped = Preferences(PAIRS.rejected, PAIRS.chosen)
    assert int(found) + int(objectives.num_right(Objective("dpo"), policy, base, swapped, *options)) == 2
    ratio = log_probs(policy, DOCUMENTS)[0] - log_probs(base, DOCUMENTS)[0]
    labels = torch.tensor([True, False, False, True])
    given = objectives.complete(Objective("kto"), Preferences(rows(DOCUMENTS, 16), None, labels))
    assert int(objectives.num_right(Objective("kto"), policy, base, given, *options)) == int(
        ((ratio > 0) == labels).sum()
    )


def test_a_batch_of_one_cannot_be_mismatched():
    with pytest.raises(ValueError, match="kto: got a batch of one row, wanted two or more to mismatch"):
        objectives.mismatched(rows(DOCUMENTS[:1]))


def test_dpo_begins_at_log_2(model):
    base, _ = model
    assert float(loss(Objective("dpo"), (base, base), PAIRS)) == pytest.approx(math.log(2))
