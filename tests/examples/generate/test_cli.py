"""The command against transformers: text, chats, adapters, settings of a folder; and its own faults."""

import dataclasses
import json
import shutil
from typing import Any

import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from examples.data import tokenizer as data_tokenizer
from examples.generate import prompts
from examples.generate.cli import main
from models import hf
from tests.helpers import tokenizers
from tests.helpers.hf_models import GQA, random_params
from tests.helpers.peft_models import shake

END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<think>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<think>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": " the quick fox "}, {"role": "assistant", "content": "Yes: über"}]
CHAT += [{"role": "user", "content": "isn't it?"}]
pytestmark = pytest.mark.filterwarnings("ignore")  # peft and transformers warn of their own deprecations
PROMPTS = ["the quick brown", "lazy dogs, isn't it? Yes: über"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama in float32 with a byte-level tokenizer, a chat template, and settings that are greedy."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.byte_level()
    cfg = dataclasses.replace(GQA, vocab=tokenizer.get_vocab_size())
    hf.save(path, cfg, random_params(cfg), extra={"eos_token_id": tokenizer.token_to_id(END)})
    return tokenizers.write(path, tokenizer, eos_token=END, bos_token="<think>", chat_template=TEMPLATE)


def theirs(folder, rows, adapter=None, **options: Any):
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    out = []
    for row in rows:
        ids = torch.tensor([row])
        with torch.no_grad():
            made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        out.append(made[0, len(row) :].tolist())
    return out


def run(folder, *options, code=0):
    assert main(["--model", str(folder), "--dtype", "f32", *map(str, options)]) == code


def answers(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def encoded(folder, texts=PROMPTS):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, [tokenizer(text)["input_ids"] for text in texts]


def test_text_is_that_of_transformers(folder, capsys):
    """Unequal prompts in one batch as JSON, and one prompt as a stream, of the weights as they are."""
    tokenizer, rows = encoded(folder)
    wanted = theirs(folder, rows, do_sample=False, max_new_tokens=30)
    run(folder, "--prompt", *PROMPTS, "--max-new-tokens", 30, "--format", "none", "--json")
    stop = tokenizer.eos_token_id
    got = answers(capsys)
    assert [answer["tokens"] for answer in got] == [[t for t in row if t != stop] for row in wanted]
    assert [answer["text"] for answer in got] == [tokenizer.decode(row, skip_special_tokens=True) for row in wanted]
    assert [(answer["prompt"], answer["adapter"]) for answer in got] == [(0, None), (1, None)]
    run(folder, "--prompt", PROMPTS[1], "--max-new-tokens", 30, "--format", "none")
    printed = capsys.readouterr()
    assert printed.out == got[1]["text"] + "\n"
    assert "prefill" in printed.err and "decode" in printed.err and "tokens/s" in printed.err


def test_packed_weights(folder, capsys):
    """The default format packs; the text is that of the packed weights."""
    run(folder, "--prompt", PROMPTS[0], "--max-new-tokens", 5, "--json")
    (packed,) = answers(capsys)
    run(folder, "--prompt", PROMPTS[0], "--max-new-tokens", 5, "--json", "--format", "none")
    (dense,) = answers(capsys)
    assert len(packed["tokens"]) == len(dense["tokens"]) == 5


def test_a_chat_by_the_template(folder, tmp_path, capsys):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert prompts.encode_chats([("chat", CHAT)], data_tokenizer.text(folder)) == [ids]
    (wanted,) = theirs(folder, [ids], do_sample=False, max_new_tokens=9)
    (tmp_path / "one.json").write_text(json.dumps(CHAT))
    (tmp_path / "two.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n\n" + json.dumps({"messages": CHAT[:1]}))
    for name, count in (("one.json", 1), ("two.jsonl", 2)):
        run(folder, "--chat", tmp_path / name, "--max-new-tokens", 9, "--format", "none", "--json")
        got = answers(capsys)
        assert len(got) == count and got[0]["tokens"] == [t for t in wanted if t != tokenizer.eos_token_id]


def adapter(folder, path, seed, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    shake(made, lambda name: "lora_" in name, seed)
    made.save_pretrained(path)
    return path


def test_adapters_answer_in_one_batch(folder, tmp_path, capsys):
    """Two PEFT adapters of different ranks and targets, each equal to PEFT's own text; and one alone."""
    first = adapter(folder, tmp_path / "first", 1, r=3, lora_alpha=9, target_modules=["q_proj", "down_proj"])
    second = adapter(folder, tmp_path / "second", 2, r=5, lora_alpha=4, target_modules=["v_proj"])
    tokenizer, rows = encoded(folder)
    wanted = [theirs(folder, rows, at, do_sample=False, max_new_tokens=12) for at in (first, second)]
    clean = lambda row: [t for t in row if t != tokenizer.eos_token_id]
    common = "--max-new-tokens", 12, "--format", "none", "--json"
    run(folder, "--adapter", first, second, "--prompt", *PROMPTS, *common)
    got = answers(capsys)
    assert [(a["prompt"], a["adapter"]) for a in got] == [(i, str(at)) for i in (0, 1) for at in (first, second)]
    assert [a["tokens"] for a in got] == [clean(wanted[j][i]) for i in (0, 1) for j in (0, 1)]
    run(folder, "--adapter", second, "--prompt", *PROMPTS, *common)
    assert [a["tokens"] for a in answers(capsys)] == [clean(row) for row in wanted[1]]


def with_settings(folder, path, **settings):
    path.mkdir()
    for name in folder.iterdir():
        shutil.copy(name, path)
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


def test_settings_of_the_folder(folder, tmp_path, capsys):
    """A list of stop tokens is followed, and named settings that are not implemented are reported."""
    _, rows = encoded(folder)
    plain = theirs(folder, rows[:1], do_sample=False, max_new_tokens=20)[0]
    stops = [plain[6], plain[11]]
    other = with_settings(folder, tmp_path / "a", eos_token_id=stops, no_repeat_ngram_size=3, num_beams=1)
    run(other, "--prompt", PROMPTS[0], "--max-new-tokens", 20, "--format", "none", "--json")
    printed = capsys.readouterr()
    first = next(i for i, token in enumerate(plain) if token in stops)
    assert json.loads(printed.out)["tokens"] == plain[:first]
    assert "not applied of generation_config.json: no_repeat_ngram_size = 3" in printed.err


def test_the_penalty_of_the_folder(folder, tmp_path, capsys):
    """A folder's penalty of repetition counts in greedy text too, as in transformers; an option replaces it."""
    tokenizer, rows = encoded(folder)
    texts = [
        [t for t in theirs(folder, rows[:1], do_sample=False, max_new_tokens=20, repetition_penalty=x)[0]]
        for x in (1.4, 0.3, 1.0)
    ]
    texts = [[t for t in text if t != tokenizer.eos_token_id] for text in texts]
    other = with_settings(folder, tmp_path / "a", repetition_penalty=1.4)
    common = "--prompt", PROMPTS[0], "--max-new-tokens", 20, "--format", "none", "--json"
    for more, text in zip(((), ("--repetition-penalty", 0.3), ("--repetition-penalty", 1)), texts, strict=True):
        run(other, *common, *more)
        printed = capsys.readouterr()
        assert json.loads(printed.out)["tokens"] == text and "not applied" not in printed.err
    assert len({*map(tuple, texts)}) == 3


SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of a folder, options
    "greedy": ({}, {}),
    "its temperature counts only if it samples": ({"temperature": 0.5, "top_k": 3}, {}),
    "sampled": ({"do_sample": True}, {}),
    "all": ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}, {}),
    "without top-k": ({"do_sample": True, "top_k": 0}, {}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_sampling_settings_are_read_as_transformers_reads_them(folder, tmp_path, name):
    """Compare the filters with the processors that ``generate`` makes of the same folder."""
    settings, given = SAMPLES[name]
    other = with_settings(folder, tmp_path / "a", **settings)
    how = prompts.sampling(prompts.settings(other), given)
    model = transformers.AutoModelForCausalLM.from_pretrained(other)
    config, _ = model._prepare_generation_config(None)  # type: ignore[operator]
    assert bool(how.temperature) == bool(config.do_sample)
    if config.do_sample:
        made = {type(p).__name__: p for p in model._get_logits_processor(config, input_ids_seq_length=1)}
        value = lambda kind, field: getattr(made[kind], field) if kind in made else None
        assert how.top_k == value("TopKLogitsWarper", "top_k") and how.min_p == value("MinPLogitsWarper", "min_p")
        assert how.top_p in (value("TopPLogitsWarper", "top_p"), 1.0)
        assert how.temperature == (value("TemperatureLogitsWarper", "temperature") or 1.0)


def test_a_seed_gives_the_same_text(folder, capsys):
    found = []
    for options in (["--seed", 1], ["--seed", 1], ["--seed", 2], ["--seed", 1, "--top-k", 1]):
        run(folder, "--prompt", PROMPTS[0], "--max-new-tokens", 12, "--temperature", 1.5, "--json", *options)
        found += [answer["tokens"] for answer in answers(capsys)]
    run(folder, "--prompt", PROMPTS[0], "--max-new-tokens", 12, "--json")
    greedy = answers(capsys)[0]["tokens"]
    assert found[0] == found[1] != found[2] and found[3] == greedy != found[0]


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("first", [None, "<think>"])
def test_special_tokens_of_a_prompt(tmp_path, add_bos, first):
    """Compare with transformers' tokenizer of the same folder."""
    options = {} if add_bos is None else {"add_bos_token": add_bos}
    path = tokenizers.write(tmp_path, tokenizers.byte_level(first=first), eos_token=END, bos_token="<think>", **options)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    found = Tokenizer.from_file(str(path / "tokenizer.json"))
    for text in PROMPTS:
        assert prompts.encode(text, found) == tokenizer(text)["input_ids"]


def test_streamed_text_is_whole():
    """Characters of several tokens are not cut, and the pieces join to the decoded text."""
    tokenizer = tokenizers.byte_level()
    for text in ("über 😀 ñandú 漢字!", "  two  spaces\n", "ü"):
        tokens = tokenizer.encode(text).ids
        stream = prompts.pieces(tokenizer)
        next(stream)
        parts = [stream.send(token) for token in tokens]
        assert all("\ufffd" not in part for part in parts)
        assert "".join(parts) + stream.send(None) == tokenizer.decode(tokens) == text
    stream = prompts.pieces(tokenizer)
    next(stream)
    assert stream.send(tokenizer.encode("😀").ids[0]) == "" and stream.send(None) == "\ufffd"


FAULTS: dict[str, tuple[list[Any], str]] = {
    "no prompt": ([], "wanted one of --prompt TEXT and --chat FILE"),
    "both": (["--prompt", "a", "--chat", "x"], "wanted one of --prompt TEXT and --chat FILE"),
    "no text": (["--prompt", ""], "prompt 0 has no tokens; wanted text"),
    "no chat": (["--chat", "/nowhere"], "/nowhere: no such file; wanted a chat as JSON"),
    "no tokens": (["--prompt", "a", "--max-new-tokens", 0], "--max-new-tokens is 0; wanted at least 1"),
    "too many": (["--prompt", "a", "--max-new-tokens", 500], "want at most max_positions = 128"),
    "temperature": (["--prompt", "a", "--temperature", -1], "temperature is -1.0; wanted a number from 0"),
    "greedy top-k": (["--prompt", "a", "--temperature", 0, "--top-k", 5], "--top-k beside --temperature 0"),
    "an unknown option": (["--prompt", "a", "--top-q", 5], "--top-q is no option; did you mean --top-"),
    "no adapter": (["--prompt", "a", "--adapter", "/nowhere", "--max-new-tokens", 2], "/nowhere"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(folder, fault, capsys):
    options, message = FAULTS[fault]
    run(folder, *options, code=2)
    printed = capsys.readouterr().err
    assert printed.startswith("generate: ") and printed.count("\n") == 1 and message in printed


CHATS = {
    "not JSON": ("{", "not JSON"),
    "empty": ("", "not JSON"),
    "a number": ("3", "wanted a list of messages, each with role and content"),
    "no content": ('[{"role": "user"}]', "wanted a list of messages, each with role and content"),
}


@pytest.mark.parametrize("name", CHATS)
def test_faults_of_chats(folder, tmp_path, name, capsys):
    text, message = CHATS[name]
    (tmp_path / "a.json").write_text(text)
    run(folder, "--chat", tmp_path / "a.json", code=2)
    assert message in capsys.readouterr().err


TEMPLATES = {
    None: "the tokenizer has no chat template; pass one with --chat-template",
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    "{% for": "chat template",
    "{{ messages.__class__.__mro__ }}": "access to attribute '__class__'",
    "{{ messages.append(1) }}": "append",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_faults_of_templates(folder, tmp_path, template, capsys):
    options = {"eos_token": END} | ({} if template is None else {"chat_template": template})
    other = with_settings(folder, tmp_path / "a")
    (other / "tokenizer_config.json").unlink()
    (other / "tokenizer_config.json").write_text(json.dumps(options))
    (tmp_path / "a.json").write_text(json.dumps(CHAT))
    run(other, "--chat", tmp_path / "a.json", code=2)
    assert TEMPLATES[template] in capsys.readouterr().err
