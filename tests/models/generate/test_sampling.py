"""Filters against transformers' logits processors, and draws against the probabilities that they leave."""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from fquant import random
from models.generate import kv_cache
from models.generate.sampling import GREEDY, Sampling, filtered, penalised, sample

CASES = {
    "temperature": Sampling(0.7),
    "top-k": Sampling(1.0, top_k=5),
    "more than there are": Sampling(1.3, top_k=500),
    "top-p": Sampling(1.0, top_p=0.8),
    "a tiny top-p": Sampling(1.0, top_p=1e-4),
    "min-p": Sampling(1.0, min_p=0.1),
    "all of min-p": Sampling(1.0, min_p=1.0),
    "all": Sampling(0.6, top_k=12, top_p=0.9, min_p=0.05),
}


def theirs(how):
    """The processors of transformers in its own order, for a config with these options."""
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    config = GenerationConfig(
        do_sample=True, temperature=how.temperature, top_k=how.top_k or 0, top_p=how.top_p, min_p=how.min_p
    )
    return model._get_logits_processor(config, input_ids_seq_length=1)


def logits(rows=40, vocab=64):
    x = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    x[:10] = x[:10].round()  # ties
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_filters_are_those_of_transformers(name, dtype):
    x = logits().to(dtype)
    got = filtered(x, CASES[name])
    wanted = theirs(CASES[name])(torch.zeros(40, 1, dtype=torch.long), x.float())
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert got.isfinite().any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("penalty", [1.3, 0.5])
def test_the_penalty_of_repetition_is_that_of_transformers(penalty, dtype):
    x, texts = logits().to(dtype), torch.randint(64, (40, 7), generator=torch.Generator().manual_seed(1))
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(texts, x.float())
    seen = kv_cache.tokens_of(texts, torch.full((40,), 7), 64)
    torch.testing.assert_close(penalised(x, seen, penalty), wanted, rtol=0, atol=0)
    how = Sampling(0.0, repetition_penalty=penalty)
    assert torch.equal(sample(x, how, seen=seen), wanted.argmax(-1))
    drawn = sample(x, Sampling(0.8, 5, repetition_penalty=penalty), random.key(0), seen)
    assert torch.equal(drawn, sample(wanted, Sampling(0.8, 5), random.key(0)))


@pytest.mark.parametrize("name", CASES)
def test_draws_have_these_probabilities(name):
    """Compare frequencies of 40000 draws with probabilities, within 5 standard deviations and 3 draws."""
    x, n = logits(1)[0], 40000
    keys = random.fold(random.key(1), torch.arange(n))
    drawn = sample(x.expand(n, -1), CASES[name], keys).bincount(minlength=64) / n
    p = filtered(x, CASES[name]).softmax(-1)
    assert ((drawn - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 3 / n).all()
    assert not drawn[p == 0].any()


def test_greedy_is_the_first_of_the_largest():
    x = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]])
    assert sample(x, GREEDY).tolist() == [1, 0]


def test_a_draw_depends_on_its_row_alone():
    x, keys = logits(), random.fold(random.key(1), torch.arange(40))
    whole = sample(x, CASES["all"], keys)
    assert whole.tolist() == [int(sample(row, CASES["all"], key)) for row, key in zip(x, keys, strict=True)]
    assert len(set(whole.tolist())) > 5
    assert sample(x[:1].expand(3, -1), CASES["all"], keys[:1].expand(3)).unique().numel() == 1  # equal keys


def test_rows_of_one_key_have_these_probabilities():
    x, n = logits()[:1], 20_000
    drawn = sample(x.expand(n, -1), CASES["all"], random.key(2)).bincount(minlength=64) / n
    torch.testing.assert_close(drawn.double(), filtered(x[0], CASES["all"]).double().softmax(-1), rtol=0, atol=0.015)


FAULTS = {
    "temperature is -1": {"temperature": -1.0},
    "temperature is inf": {"temperature": float("inf")},
    "temperature is nan": {"temperature": float("nan")},
    "top_k is 0; wanted at least 1": {"top_k": 0},
    "top_p is 1.5; wanted a probability": {"top_p": 1.5},
    "top_p is 0.* use temperature 0": {"top_p": 0.0},
    "min_p is -0.1; wanted a probability": {"min_p": -0.1},
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message):
    with pytest.raises(ValueError, match=message):
        Sampling(**FAULTS[message])


def test_faults_of_calls():
    with pytest.raises(ValueError, match="temperature is 0, at which there are no probabilities"):
        filtered(logits(), GREEDY)
    with pytest.raises(ValueError, match=r"temperature is 1.0, and there is no key; pass fquant.random.key\(seed\)"):
        sample(logits(), Sampling())
