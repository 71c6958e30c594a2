"""One run as a person makes it: each file of a step is read by the next step, and by the library that it is for.

A chat file and a folder that transformers wrote become a validated QLoRA run, its evaluation, a merged folder, answers,
and exported files. The tests of each program have more cases; here the files of one run are followed.
"""

import importlib
import importlib.util
import json
import math

import gguf
import numpy as np
import peft
import pytest
import torch
import transformers
from PIL import Image
from safetensors import safe_open
from tokenizers import Tokenizer

from examples import export, merge
from examples.evaluate import cli as evaluate
from examples.generate import cli as generate
from examples.qlora import cli as qlora
from fquant import NF4_DQ, dequantize, quantize, tree
from models import hf
from tests.helpers import tokenizers

# Of transformers, bitsandbytes and PEFT, of their own deprecations.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("start to end")]
TURN = "<|im_start|>{{ m.role }}\n"
TEMPLATE = (  # ChatML, which marks the assistant's turns for transformers' own mask
    "{% for m in messages %}{% if m.role == 'assistant' %}" + TURN + "{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}\n{% else %}" + TURN + "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUMBERS = "zero one two three four five six seven eight nine".split()
SEQ, STEPS, EVERY, NEW = 96, 36, 12, 24
SYSTEM = {"role": "system", "content": "Add, in words."}


def turns(a, b):
    return [
        {"role": "user", "content": f"{a}+{b}?"},
        {"role": "assistant", "content": f"{NUMBERS[a + b]}."},
    ]


ALL = [(a, b) for a in range(10) for b in range(10 - a)]
CHATS = [[*([SYSTEM] if i % 3 == 0 else []), *turns(*pair), *turns(*ALL[(7 * i) % 55])] for i, pair in enumerate(ALL)]
HELD = CHATS[::9]
TRAIN = [chat for chat in CHATS if chat not in HELD]
QUESTION = TRAIN[1][:1]


def done(main, *args):
    assert main([str(arg) for arg in args]) == 0


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def write_chats(path, chats):
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """A folder with the chats, and the model and tokenizer as transformers writes them."""
    at = tmp_path_factory.mktemp("start_to_end")
    found = tokenizers.byte_level()
    found.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(at / "model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(at / "model")
    write_chats(at / "chats.jsonl", TRAIN)
    write_chats(at / "held_out.jsonl", HELD)
    (at / "question.json").write_text(json.dumps(QUESTION))
    return at


@pytest.fixture(scope="module")
def ran(at):
    """The folder after every step that writes: the run, its evaluation, the merged folder, and what is exported."""
    options = "--rank", 8, "--seq", SEQ, "--batch", 4, "--steps", STEPS, "--lr", 0.02, "--mesh", "fsdp=1"
    data = "--data", at / "chats.jsonl", "--eval-data", at / "held_out.jsonl", "--validate-every", EVERY
    more = "--dtype", "f32", "--checkpoint", "none", "--save-every", EVERY, "--keep", 2
    done(qlora.main, "--model", at / "model", *data, *options, *more, "--out", at / "run")
    adapter = at / "run" / "best" / "adapter"
    done(merge.main, at / "model", adapter, at / "merged")
    done(export.main, at / "merged", at / "model.gguf", "--kind", "q8_0")
    done(export.main, at / "merged", at / "bnb", "--to", "bnb-nf4")
    done(export.main, at / "run" / "checkpoints" / f"step-{STEPS - EVERY}", at / "earlier", "--to", "adapter")
    return at


def base(at, packed=False):
    """The model of transformers; packed: with the values of the weights that the run has trained beside."""
    model = transformers.LlamaForCausalLM.from_pretrained(at / "model", dtype=torch.float32)
    if packed:
        cfg, params = hf.load(at / "model", torch.float32)
        params = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", lambda w: dequantize(quantize(w, NF4_DQ)), params)
        for path, w in tree.items(params):
            model.get_parameter(hf.tensor_name(path, cfg)).data.copy_(w)
    return model.eval()


def adapted(at, packed=False, name="run/best/adapter"):
    return peft.PeftModel.from_pretrained(base(at, packed), at / name).eval()


def encoded(at):
    """Tokens and assistant masks of transformers for each chat that was held out."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(at / "model")
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    found = [tokenizer.apply_chat_template(chat, **options) for chat in HELD]
    return [(one["input_ids"], one["assistant_masks"]) for one in found]


def held_out_loss(model, chats):
    """The mean loss in nats of the tokens that count, each chat by itself but cut where rows of SEQ tokens end."""
    nats, count, start = 0.0, 0, 0
    for ids, mask in chats:
        stop = start + len(ids)
        for cut in range(start // SEQ * SEQ, stop, SEQ):
            first, last = max(cut - start, 0), min(cut + SEQ + 1, stop) - start
            piece, counts = torch.tensor(ids[first:last]), torch.tensor(mask[first:last], dtype=torch.bool)[1:]
            with torch.no_grad():
                chosen = model(piece[None]).logits[0, :-1].log_softmax(-1).gather(1, piece[1:, None])[:, 0]
            nats -= float(chosen[counts].double().sum())
            count += int(counts.sum())
        start = stop
    return nats / count


def test_data_are_shown_as_transformers_encodes_them(at, capsys):
    """Rows are cut from chats that follow one another."""
    args = "--model", at / "model", "--data", at / "held_out.jsonl", "--seq", SEQ, "--holdout", 1
    done(qlora.main, *args, "--show-data", 2, "--json")
    rows = lines(capsys)
    chats, tokenizer = encoded(at), Tokenizer.from_file(str(at / "model" / "tokenizer.json"))
    ids, mask = ([x for chat in chats for x in chat[i]] for i in (0, 1))
    stream = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    assert len(rows) == 2 and rows[0]["tokens"] == stream[:SEQ]
    assert rows[0]["counts"] == [m == 1 for m in mask[:SEQ]]
    counted = "".join(t for t, counts in zip(rows[0]["tokens"], rows[0]["counts"], strict=True) if counts)
    assert counted.startswith(HELD[0][2]["content"] + "<|im_end|>")


def test_the_run_is_validated_as_transformers_and_peft_compute_it(ran):
    run, chats = ran / "run", encoded(ran)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held = {m["step"] + 1: m["validation"] for m in metrics if m["validation"] is not None}
    assert [*held] == [*range(EVERY, STEPS + 1, EVERY)] and metrics[-1]["loss"] < metrics[0]["loss"] / 2
    best = json.loads((run / "best" / "best.json").read_text())
    assert best["validation"] == min(held.values()) == held[best["steps"]]
    for name, loss in (
        ("run/best/adapter", best["validation"]), ("run/adapter", held[STEPS]), ("earlier", held[STEPS - EVERY]),
    ):  # fmt: skip
        assert held_out_loss(adapted(ran, packed=True, name=name), chats) == pytest.approx(loss, abs=1e-5)
    result = json.loads((run / "result.json").read_text())
    assert result["perplexity_packed"] == pytest.approx(math.exp(held_out_loss(base(ran, True), chats)), rel=1e-5)
    assert result["perplexity_adapted"] == pytest.approx(math.exp(held[STEPS]), rel=1e-6)


def test_states_and_pictures_are_read(ran):
    kept = ran / "run" / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == [f"step-{step}" for step in (STEPS - EVERY, STEPS)]
    state = {}
    for path in (kept / f"step-{STEPS}").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            state |= {name: file.get_tensor(name) for name in file.keys()}
    assert state["done"] == STEPS and sum(name.endswith(".a") for name in state) >= 14
    assert Image.open(ran / "run" / "loss.png").size == (800, 450)


def test_evaluation_is_that_of_transformers(ran, tmp_path, capsys):
    data = "--model", ran / "model", "--data", ran / "held_out.jsonl", "--seq", SEQ, "--dtype", "f32"
    adapters = "--adapters", ran / "run" / "best" / "adapter"
    done(evaluate.main, *data, "--formats", "none", "nf4_dq", *adapters, "--json", "--out", tmp_path)
    found, chats = lines(capsys), encoded(ran)
    assert found == json.loads((tmp_path / "evaluation.json").read_text())
    models = base(ran), adapted(ran), base(ran, True), adapted(ran, True)
    assert [one["format"] for one in found] == ["none", "none", "nf4_dq", "nf4_dq"]
    assert [bool(one["adapter"]) for one in found] == [False, True, False, True]
    for one, model in zip(found, models, strict=True):
        assert one["perplexity"] == pytest.approx(math.exp(held_out_loss(model, chats)), rel=1e-5)
    assert found[3]["perplexity"] < found[2]["perplexity"] / 2
    assert Image.open(tmp_path / "evaluation.png").format == "PNG"


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_the_merged_folder_is_peft_s_own_merge(ran):
    ids, _ = encoded(ran)[0]
    ours = transformers.AutoModelForCausalLM.from_pretrained(ran / "merged", dtype=torch.float32)
    theirs = adapted(ran).merge_and_unload()
    assert (logits(ours, ids) - logits(theirs, ids)).abs().max() < 2e-5
    assert (logits(ours, ids) - logits(base(ran), ids)).abs().max() > 0.1
    tokenizer = transformers.AutoTokenizer.from_pretrained(ran / "merged")
    assert tokenizer.apply_chat_template(HELD[0])["input_ids"] == ids
    assert ours.generation_config.eos_token_id == tokenizer.eos_token_id


def question(at):
    tokenizer = transformers.AutoTokenizer.from_pretrained(at / "merged")
    return tokenizer, tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]


def answer(model, ids):
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    prompt = torch.tensor([ids])
    made = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
    return made[0, len(ids) :].tolist()


def test_answers_are_those_of_transformers(ran, capsys):
    """Of the merged folder, and of the base with the adapter, dense and packed."""
    tokenizer, ids = question(ran)
    merged = transformers.AutoModelForCausalLM.from_pretrained(ran / "merged", dtype=torch.float32)
    adapter = "--adapter", ran / "run" / "best" / "adapter"
    for theirs, args in (
        (merged, ("--model", ran / "merged", "--format", "none")),
        (adapted(ran), ("--model", ran / "model", *adapter, "--format", "none")),
        (adapted(ran, packed=True), ("--model", ran / "model", *adapter, "--format", "nf4_dq")),
    ):
        options = "--temperature", 0, "--max-new-tokens", NEW, "--dtype", "f32", "--json"
        done(generate.main, *args, "--chat", ran / "question.json", *options)
        (got,) = lines(capsys)
        wanted = [t for t in answer(theirs, ids) if t != tokenizer.eos_token_id]
        assert got["tokens"] == wanted and got["text"] == tokenizer.decode(wanted)
    assert got["text"].endswith(".") and len(answer(base(ran), ids)) == NEW > len(wanted)  # it learnt to stop


def test_the_gguf_is_read_by_its_own_package(ran):
    file = gguf.GGUFReader(ran / "model.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(ran / "merged", dtype=torch.float32)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    assert len(tensors) == 2 * 9 + 3
    names = {"blk.1.ffn_down": "model.layers.1.mlp.down_proj", "blk.0.attn_v": "model.layers.0.self_attn.v_proj"}
    for theirs, ours in (names | {"output": "lm_head"}).items():
        tensor, w = tensors[f"{theirs}.weight"], model.get_parameter(f"{ours}.weight").detach().numpy()
        assert tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0
        assert np.array_equal(tensor.data, gguf.quantize(w, gguf.GGMLQuantizationType.Q8_0))
        assert np.abs(gguf.dequantize(tensor.data, tensor.tensor_type) - w).max() < np.abs(w).max() / 200
    stored = file.get_field("tokenizer.chat_template")
    assert stored is not None and stored.contents() == TEMPLATE


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="pip install llama-cpp-python, built from C++"
)
def test_llama_cpp_answers_as_transformers(ran):
    """The same tokens of the prompt, and the same answer."""
    llama = importlib.import_module("llama_cpp").Llama(
        str(ran / "model.gguf"), n_ctx=128, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0
    )
    tokenizer, ids = question(ran)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert llama.tokenize(text.encode(), add_bos=False, special=True) == ids
    merged = transformers.AutoModelForCausalLM.from_pretrained(ran / "merged", dtype=torch.float32)
    llama.eval(ids)
    wanted = logits(merged, ids)
    assert (torch.from_numpy(np.array(llama.scores[: len(ids)])) - wanted).norm() < 0.02 * wanted.norm()
    made = llama(ids, max_tokens=NEW, temperature=0.0)["choices"][0]["text"]
    assert made == tokenizer.decode(answer(merged, ids), skip_special_tokens=True)


def test_bitsandbytes_reads_the_exported_folder(ran):
    ids, _ = encoded(ran)[0]
    with torch.compiler.set_stance("force_eager"):
        model = transformers.AutoModelForCausalLM.from_pretrained(ran / "bnb", device_map="cpu", dtype=torch.float32)
        got, wanted = logits(model, ids), logits(base(ran), ids)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(ran / "merged", dtype=torch.float32), ids)
    assert (got - merged).norm() < 0.3 * (wanted - merged).norm()  # far nearer to what was merged than to the base
