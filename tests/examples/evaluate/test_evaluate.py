"""examples.evaluate against logits of transformers and PEFT, token by token."""

import json
from functools import partial

import peft as peer
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.data import dataset as data
from examples.data import tokenizer as tokenizers
from examples.evaluate import choices, cli
from examples.evaluate.measure import losses
from fquant import dequantize, lora, quantize, random, tree
from fquant.format import NF4
from fquant.io import peft
from models import hf

# PEFT 0.21 asks transformers 5 for a property by its former name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LINEARS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
QUESTIONS = [
    {"question": "def f(x):", "choices": ["return x", "x = x + 1", "pass"], "answer": 0, "id": 7},
    {"question": "import ", "choices": ["os", "everything that there is"], "answer": "B"},
    {"question": "The sum of 1 and 2 is", "choices": ["3", "four", "not known"], "answer": 2},
    {"question": "for i in", "choices": ["range(10):", "ten"], "answer": "a"},
]


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    _, params = hf.load(model)
    adapters = lora.init(params, r"layers\.\d+\.(q|v|down)", rank=4, alpha=8, key=random.key(1))
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    peft.save(folder, tree.map(lambda t: t + 0.05, adapters), partial(hf.module_name, cfg=hf.read_config(model)))
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    return path


def run(capsys, *args):
    status = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def variants(model, adapter):
    """The models of transformers and PEFT in the order of the table."""
    cfg, params = hf.load(model, torch.float32)
    packed = dequantize(tree.map_at(LINEARS, lambda w: quantize(w, NF4), params))
    found = []
    for weights in (params, packed):
        for is_adapted in (False, True):
            theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            for path, w in tree.items(weights):
                theirs.get_parameter(hf.tensor_name(path, cfg)).data.copy_(w)
            found.append(peer.PeftModel.from_pretrained(theirs, adapter) if is_adapted else theirs)
    return found


def log_probs(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_perplexity(model, adapter, text, variants, capsys, tmp_path):
    """The mean over all predicted tokens of rows, each row alone, documents masked by their own attention."""
    flags = ["--model", model, "--data", text, "--formats", "none", "nf4", "--adapters", adapter, "--json"]
    found = run(capsys, *flags, "--rows", 5, "--seq", 32, "--batch", 2, "--dtype", "f32", "--out", tmp_path)
    assert [(x["format"], bool(x["adapter"])) for x in found] == [
        ("none", False), ("none", True), ("nf4", False), ("nf4", True),
    ]  # fmt: skip
    rows = data.split(data.prepare(text, model, 32), 5)[1]
    assert rows.segments is not None and not rows.segments.any()  # one document
    for one, theirs in zip(found, variants, strict=True):
        nats, count = 0.0, 0
        for tokens, targets in zip(rows.tokens.tolist(), rows.targets.tolist(), strict=True):
            probs = log_probs(theirs, tokens)
            nats -= sum(float(probs[i, y]) for i, y in enumerate(targets) if y >= 0)
            count += sum(y >= 0 for y in targets)
        assert one["perplexity"] == pytest.approx(torch.tensor(nats / count).exp().item(), rel=1e-4)
        assert one["accuracy"] is None
    assert found[0]["nbytes"] > found[2]["nbytes"] and found[0]["bits"] == 16 and 4.4 < found[2]["bits"] < 4.6
    assert json.loads((tmp_path / "evaluation.json").read_text()) == found
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def test_accuracy(model, adapter, questions, variants, capsys):
    """Scores of choices are sums of log-probabilities of the tokens behind the question's."""
    flags = ["--model", model, "--choices", questions, "--formats", "none", "nf4", "--adapters", adapter, "--json"]
    found = run(capsys, *flags, "--seq", 64, "--batch", 3, "--dtype", "f32")
    its = tokenizers.text(model)
    tokenizer = its.tokenizer()
    ids = lambda x: tokenizer.encode(x, add_special_tokens=False).ids
    for one, theirs in zip(found, variants, strict=True):
        right = [0, 0]
        for question in QUESTIONS:
            context = question["question"].rstrip()
            begin = list(its.begin)
            scores = []
            for choice in question["choices"]:
                whole, known = ids(f"{context} {choice}"), len(ids(context))
                probs = log_probs(theirs, begin + whole)
                scores.append(sum(float(probs[len(begin) + i - 1, whole[i]]) for i in range(known, len(whole))))
            answer = question["answer"]
            answer = "abc".index(answer.lower()) if isinstance(answer, str) else answer
            by_bytes = [score / len(choice.encode()) for score, choice in zip(scores, question["choices"], strict=True)]
            for i, values in enumerate((scores, by_bytes)):
                right[i] += values.index(max(values)) == answer
        assert [one["accuracy"], one["accuracy_by_bytes"]] == [n / len(QUESTIONS) for n in right]
        assert one["perplexity"] is None


def test_scores_row_by_row(model, questions):
    """Padding and the other rows of a batch change no score."""
    cfg, params = hf.load(model, torch.float32)
    task = choices.task(choices.read(questions), tokenizers.read(model), (), 64)
    together, alone = (losses(cfg, params, {}, task.rows, n, torch.float32, lambda: None) for n in (10, 1))
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-6)
    assert task.counts == [3, 2, 3, 2] and task.answers == [0, 1, 2, 0]
    assert task.sizes.tolist()[:3] == [8, 9, 4]


def test_accuracies():
    """The second choice is likelier, and the first over its bytes."""
    task = choices.Task(None, [2, 2], [1, 0], torch.tensor([10.0, 1.0, 10.0, 1.0]))  # type: ignore[arg-type]
    scores = torch.tensor([-5.0, -2.0, -5.0, -2.0], dtype=torch.float64)
    assert choices.accuracies(task, scores) == (0.5, 0.5)
    assert choices.accuracies(task._replace(answers=[1, 1]), scores) == (1.0, 0.0)


BROKEN = {
    "json": ("{", "questions.jsonl:1: not JSON"),
    "keys": ('{"question": "a"}', "wanted an object with answer, choices, question"),
    "choices": ('{"question": "a", "choices": ["x"], "answer": 0}', "choices: got ['x'], wanted two texts or more"),
    "answer": ('{"question": "a", "choices": ["x", "y"], "answer": 2}', "answer: got 2, wanted 0 to 1, or a letter"),
    "letter": ('{"question": "a", "choices": ["x", "y"], "answer": "C"}', "answer: got 'C', wanted 0 to 1"),
    "truth": ('{"question": "a", "choices": ["x", "y"], "answer": true}', "answer: got True, wanted 0 to 1"),
    "question": ('{"question": 3, "choices": ["x", "y"], "answer": 1}', "question: got 3, wanted text"),
    "more": ('{"question": "a", "choices": ["x", "y"], "answer": 1, "images": [1]}', "got images beside the question"),
    "empty": ("\n", "questions.jsonl: is empty; wanted questions"),
}


@pytest.mark.parametrize(("content", "said"), BROKEN.values(), ids=BROKEN)
def test_broken_questions(model, tmp_path, capsys, content, said):
    path = tmp_path / "questions.jsonl"
    path.write_text(content)
    assert cli.main(["--model", str(model), "--choices", str(path), "--seq", "64"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("evaluate: ") and said in printed and printed.count("\n") == 1


REFUSED = {
    "long": (["--choices", "{questions}", "--seq", "4"], "tokens with a choice, wanted at most 4; use --seq"),
    "twice": (["--formats", "nf4", "nf4"], "--formats nf4 nf4: wanted at least one, and each once"),
    "positions": (["--seq", "128"], "--seq is 128; wanted at most 64, the positions of"),
    "adapter": (["--seq", "32", "--adapters", "nowhere"], "nowhere/adapter_config.json: got no such file"),
}


@pytest.mark.parametrize(("args", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(model, questions, capsys, args, said):
    assert cli.main(["--model", str(model), *(arg.format(questions=questions) for arg in args)]) == 2
    assert said in capsys.readouterr().err


def test_the_table(model, questions, capsys):
    assert cli.main(["--model", str(model), "--choices", str(questions), "--seq", "64", "--formats", "nf4"]) == 0
    printed = capsys.readouterr().out
    assert "accuracy" in printed and "perplexity" not in printed and "nf4" in printed
