"""Text of a decoder against transformers' ``generate``, token for token, and against the whole sequence's logits."""

from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from torch.func import grad, vmap

import shard
from fquant import NF4, NF4_DQ, jit, lora, quantize, random, tree
from models import decoder, generate, hf
from shard import Rules
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.hf_models import CONFIGS, random_params

LENGTHS = (5, 37, 50)  # both sides of every window, and of the lengths from which scalings change
PROMPTS = [torch.randint(1, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
WEIGHTS = r"layers\.\d+\.(q|k|v|o|gate|up|down|qkv|gate_up)"
BY_LENGTH = ("dynamic scaling", "phi3, longrope", "phi3, longrope, short")  # angles of a token change as a text grows
SOME = ("gemma3", "gpt_oss", "grouped", "phi3, part of the head, window", "qwen3_moe, dense layers, windows")
ORDER = [*SOME, "phi3, longrope", "dynamic scaling", *(name for name in CONFIGS if name not in SOME + BY_LENGTH)]
ORDER += ["phi3, longrope, short"]
STEPS = 40


def padded(texts):
    width = max(map(len, texts))
    rows = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    return rows, torch.tensor([len(text) for text in texts])


@cache
def packed(name, fmt=NF4):
    return tree.map_at(WEIGHTS, partial(quantize, format=fmt), random_params(CONFIGS[name]))


def adapters(base, seed, rank=3, alpha=6.0, targets=WEIGHTS):
    made = lora.init(base, targets, rank=rank, alpha=alpha, key=seed)
    key = random.key(seed + 100)
    return tree.map_with_path(lambda path, t: 0.2 * random.normal(random.fold(key, path), tuple(t.shape)), made)


def theirs(folder, stop: Any = None):
    options: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    width = max(LENGTHS)
    rows = torch.tensor([[0] * (width - len(text)) + text for text in PROMPTS])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in PROMPTS])
    options = {"do_sample": False, "eos_token_id": stop, "pad_token_id": 0, "max_new_tokens": STEPS}
    with torch.no_grad():
        return model.generate(rows, attention_mask=mask, **options)[:, width:].tolist()


def up_to(stop, text):
    ends = [i for i, token in enumerate(text) if token in stop]
    return text[: ends[0] + 1] if ends else text


@pytest.mark.parametrize("name", slow_after(7, ORDER))
def test_greedy_text_is_that_of_transformers(name, tmp_path):
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    hf.save(tmp_path, cfg, params)
    wanted = theirs(tmp_path)
    call = partial(generate.generate, params, PROMPTS, cfg, max_new_tokens=STEPS, step=generate.step)
    assert call() == wanted
    stop = [wanted[0][7], wanted[2][19]]  # a list, and below one token
    for some in (stop, stop[:1]):
        rows = theirs(tmp_path, stop=some if len(some) > 1 else some[0])
        assert call(stop=some) == [up_to(some, text) for text in rows] == [up_to(some, text) for text in wanted]


def test_repetition_is_penalised_as_in_transformers(tmp_path):
    cfg, params = CONFIGS["grouped"], random_params(CONFIGS["grouped"])
    hf.save(tmp_path, cfg, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    options = {"do_sample": False, "repetition_penalty": 1.5, "max_new_tokens": STEPS, "pad_token_id": 0}
    rows = [torch.tensor([text]) for text in PROMPTS]
    wanted = [model.generate(row, attention_mask=row * 0 + 1, **options)[0, row.shape[1] :].tolist() for row in rows]
    how = generate.Sampling(0.0, repetition_penalty=1.5)
    for step in (generate.step, generate.captured_step):
        assert generate.generate(params, PROMPTS, cfg, max_new_tokens=STEPS, how=how, step=step) == wanted
    plain = generate.generate(params, PROMPTS, cfg, max_new_tokens=STEPS)
    assert plain != wanted and any(len(set(text)) < STEPS for text in plain)


@pytest.mark.parametrize("name", slow_after(5, [name for name in ORDER if name not in BY_LENGTH]))
def test_logits_of_the_cache_are_those_of_the_whole_sequence(name):
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    texts = [text + PROMPTS[2][:9] for text in PROMPTS]
    logits, held = generate.prefill(params, *padded(PROMPTS), cfg, longest=64)
    for i in range(10):
        for row, text in enumerate(texts):
            whole = decoder.forward(params, torch.tensor(text[: LENGTHS[row] + i]), cfg)[-1]
            torch.testing.assert_close(logits[row], whole, rtol=0, atol=2e-5)
        if i < 9:
            token = torch.tensor([text[LENGTHS[row] + i] for row, text in enumerate(texts)])
            logits, held = generate.decode(params, token, held, cfg)


@pytest.mark.parametrize("name", slow_after(2, SOME))
def test_captured_is_eager(name):
    """Compare tokens and caches in every bit; one trace serves all steps, and the donated cache is written in place."""
    cfg, params, key = CONFIGS[name], packed(name), random.key(3)
    how = generate.Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01)
    captured = jit(generate.step, donate=("cache",))
    ours, cached = (generate.prefill(params, *padded(PROMPTS), cfg, longest=64)[1] for _ in range(2))
    token = again = torch.tensor([1, 2, 3])
    memory = [t.data_ptr() for t in (*cached.keys, *cached.values)]
    for _ in range(6):
        token, ours = generate.step(params, token, ours, key, cfg, how)
        again, cached = captured(params, again, cached, key, cfg, how)
        assert all(map(torch.equal, tree.leaves((token, ours)), tree.leaves((again, cached))))
    assert [t.data_ptr() for t in (*cached.keys, *cached.values)] == memory
    assert len(captured.traced) == 1  # type: ignore[attr-defined]
    fill = jit(generate.prefill)
    wanted = generate.prefill(params, *padded(PROMPTS), cfg, longest=64)
    got = fill(params, *padded(PROMPTS), cfg, longest=64)
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(wanted)))


@pytest.mark.parametrize("name", SOME)
def test_a_packed_base_with_adapters(name):
    """Compare with the logits of the whole sequence, and with the text of the merged weights."""
    cfg, base = CONFIGS[name], packed(name)
    both = lora.attach(base, adapters(base, 1))
    texts = generate.generate(both, PROMPTS, cfg, max_new_tokens=12, step=generate.step)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        logits = decoder.forward(both, torch.tensor(prompt + text[:-1]), cfg)[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == text


@pytest.mark.parametrize("name", slow_after(2, SOME))
def test_adapters_of_rows(name):
    """Each row has the logits of its adapter alone, of other ranks, scalings and targets too."""
    cfg, base = CONFIGS[name], packed(name)
    second = r"layers\.1\.(q|qkv|down)"
    many = [adapters(base, 1), adapters(base, 2, rank=5, alpha=2.0), {}, adapters(base, 3, targets=second)]
    texts, which = [PROMPTS[i] for i in (0, 1, 0, 2, 1)], [1, 0, 2, 3, 1]
    own = generate.rows(lora.stack(generate.aligned(many)), torch.tensor(which))
    logits, held = generate.prefill(base, *padded(texts), cfg, adapters=own, longest=64)
    token = logits.argmax(-1)
    more, _ = generate.decode(base, token, held, cfg, adapters=own)
    for row, (text, j) in enumerate(zip(texts, which, strict=True)):
        alone = lora.attach(base, many[j])
        first, cached = generate.prefill(alone, *padded([text]), cfg, longest=64)
        then, _ = generate.decode(alone, token[row : row + 1], cached, cfg)
        torch.testing.assert_close(logits[row], first[0], rtol=0, atol=5e-5)
        torch.testing.assert_close(more[row], then[0], rtol=0, atol=5e-5)
    call = partial(generate.generate, base, texts, cfg, max_new_tokens=8, adapters=own)
    assert call() == call(step=generate.step)


def test_a_key_gives_the_same_text_in_any_batch():
    cfg, params = CONFIGS["grouped"], random_params(CONFIGS["grouped"])
    call = partial(
        generate.generate, params, cfg=cfg, max_new_tokens=20, how=generate.Sampling(1.0), step=generate.step
    )
    keys = random.fold(random.key(5), torch.arange(len(PROMPTS)))
    together = call(PROMPTS, key=random.key(5))
    assert together == call(PROMPTS, key=keys)
    assert together == [call([prompt], key=key[None])[0] for prompt, key in zip(PROMPTS, keys, strict=True)]
    assert together != call(PROMPTS, key=random.key(6))


@pytest.mark.parametrize("step", [generate.step, generate.captured_step], ids=["eager", "captured"])
def test_samples_of_one_prompt_differ(step):
    cfg, params = CONFIGS["grouped"], random_params(CONFIGS["grouped"])
    how = generate.Sampling(1.0)
    samples = generate.generate(params, [PROMPTS[0]] * 6, cfg, max_new_tokens=12, how=how, key=random.key(5), step=step)
    assert len(set(map(tuple, samples))) == 6


@pytest.mark.parametrize("name", ["grouped", "gemma2"])
def test_transforms_of_prefill(name):
    """Gradients of adapters are those of ``decoder.forward``; examples can be mapped over."""
    cfg, base = CONFIGS[name], packed(name)
    trained, tokens, lengths = adapters(base, 1), *padded(PROMPTS)
    last = lambda a: generate.prefill(lora.attach(base, a), tokens, lengths, cfg)[0].logsumexp(-1).sum()
    rows = torch.arange(3), lengths - 1
    wanted = lambda a: decoder.forward(lora.attach(base, a), tokens, cfg)[rows].logsumexp(-1).sum()
    for got, want in zip(tree.leaves(grad(last)(trained)), tree.leaves(grad(wanted)(trained)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    one = lambda text, length: generate.prefill(base, text[None], length[None], cfg)
    logits, held = vmap(one)(tokens, lengths)
    want, cached = generate.prefill(base, tokens, lengths, cfg)
    torch.testing.assert_close(logits[:, 0], want, rtol=0, atol=2e-5)
    for row, length in enumerate(LENGTHS):  # slots behind the length hold anything
        got, want = (x.keys[1][row].reshape(50, -1)[:length] for x in (held, cached))
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def on_a_mesh(name, fmt):
    cfg, base = CONFIGS[name], packed(name, fmt)
    mesh, rules = shard.mesh(fsdp=2), Rules()
    own = generate.rows(lora.stack([adapters(base, 1), adapters(base, 2)]), torch.tensor([1, 0, 1]))
    placed = shard.local(shard.place(base, decoder.dims(cfg), rules, mesh, cfg))
    out = []
    for tokens in (None, 150):
        comm = shard.comm(mesh, rules, tokens=tokens)
        call = partial(generate.generate, placed, PROMPTS, cfg, max_new_tokens=6, comm=comm)
        out += [call(), call(step=generate.step)]
    return out, call(adapters=own)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("name, fmt", slow_after(1, [("gemma3", NF4_DQ), ("gpt_oss", NF4), ("qwen3", NF4)]))
def test_a_mesh_gives_the_text_of_one_process(name, fmt):
    cfg, base = CONFIGS[name], packed(name, fmt)
    own = generate.rows(lora.stack([adapters(base, 1), adapters(base, 2)]), torch.tensor([1, 0, 1]))
    wanted = generate.generate(base, PROMPTS, cfg, max_new_tokens=6, step=generate.step)
    adapted = generate.generate(base, PROMPTS, cfg, max_new_tokens=6, step=generate.step, adapters=own)
    for texts, with_adapters in ranks.run(2, on_a_mesh, name, fmt):
        assert texts == [wanted] * 4 and with_adapters == adapted


def test_bfloat16_stream():
    """The residual stream and the cache have the dtype that is asked for."""
    cfg, base = CONFIGS["gemma3"], packed("gemma3")
    logits, held = generate.prefill(base, *padded(PROMPTS), cfg, longest=51, dtype=torch.bfloat16)
    again, held = generate.decode(base, logits.argmax(-1), held, cfg, dtype=torch.bfloat16)
    assert {t.dtype for t in (logits, again, *held.keys, *held.values)} == {torch.bfloat16}


GQA = CONFIGS["grouped"]
FAULTS = {
    "an empty prompt": (dict(prompts=[[1], []]), "prompts: 2, and lengths from 0; wanted text"),
    "no tokens": (dict(max_new_tokens=0), "max_new_tokens is 0; wanted at least 1"),
    "too many": (dict(max_new_tokens=100), "prompts: 150 tokens with the new ones, want at most max_positions = 128"),
    "no key": (dict(how=generate.Sampling()), r"temperature is 1.0, and there is no key; pass fquant.random.key"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault):
    options, message = FAULTS[fault]
    given = {"prompts": PROMPTS, "max_new_tokens": 2} | options
    with pytest.raises(ValueError, match=message):
        generate.generate(random_params(GQA), given.pop("prompts"), GQA, **given)


def test_faults_of_shapes():
    params, (tokens, lengths) = random_params(GQA), padded(PROMPTS)
    with pytest.raises(ValueError, match=r"prefill: tokens \(3, 50\) and lengths \(2,\); wanted \[b t\] and \[b\]"):
        generate.prefill(params, tokens, lengths[:2], GQA)
    with pytest.raises(ValueError, match=r"prefill: longest is 40; wanted from 50, .* to max_positions = 128"):
        generate.prefill(params, tokens, lengths, GQA, longest=40)
    _, held = generate.prefill(params, tokens, lengths, GQA)
    with pytest.raises(ValueError, match=r"decode: token \(2,\) and a cache of 2 layers, 3 rows; wanted one token"):
        generate.decode(params, lengths[:2], held, GQA)
    with pytest.raises(IndexError, match="out of bounds"):
        generate.decode(params, lengths, held, GQA)
    with pytest.raises(IndexError, match=r"tokens: 96 at \[0, 0\], want 0 to 95"):
        generate.decode(params, torch.tensor([96, 1, 1]), held, GQA)


def test_ranks_stop_together():
    """Rows that have stopped give None until all ranks agree."""
    params, call = random_params(GQA), partial(generate.stream, max_new_tokens=6, step=generate.step)
    first = [tokens[0] for tokens in call(params, PROMPTS[:1], GQA)]
    rows = list(call(params, PROMPTS[:1], GQA, stop=[first[1]], agreed=lambda done: False))
    assert rows == [[first[0]], [first[1]], *[[None]] * 4]
