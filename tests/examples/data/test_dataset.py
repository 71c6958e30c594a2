"""examples.data.dataset against loops that a reader can check: every token once, every target where it belongs."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from examples.data import dataset, show, store, tokenizer
from examples.data.dataset import IGNORED, Rows
from fquant import random, tree
from tests.helpers.data.chats import FAMILIES

RECORDS = [
    {"prompt": "prompt th", "completion": "the answer"},
    {"text": "plain"},
    {"text": ""},
    {"prompt": "", "completion": ""},
    {"text": "a long tail of text that is all target " * 3},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return FAMILIES["ChatML"].folder(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield store.default_folder()


def written(path, items):
    path.write_text("\n".join(map(json.dumps, items)), "utf-8")
    return path


def documents(path, folder):
    """Tokens, targets and lengths of a store, as lists."""
    found = store.of_file(path, tokenizer.text(folder), store.default_folder())
    numbers, ends = store.opened(found)
    return (numbers & (2**31 - 1)).tolist(), (numbers < 0).tolist(), np.diff(ends >> 1, prepend=0).tolist()


@pytest.mark.parametrize("seq", [1, 2, 5, 16, 33])
def test_rows_against_a_loop(tmp_path, folder, seq):
    path = written(tmp_path / "a.jsonl", RECORDS)
    tokens, counts, lengths = documents(path, folder)
    segments = [number for number, length in enumerate(lengths) for _ in range(length)]
    rows = dataset.read(dataset.prepare(path, folder, seq))
    assert rows.segments is not None
    assert {t.dtype for t in tree.leaves(rows)} == {torch.int64}
    assert {t.shape for t in tree.leaves(rows)} == {(-(-(len(tokens) - 1) // seq), seq)}
    for row in range(len(rows.tokens)):
        for column in range(seq):
            i, got = row * seq + column, [t[row, column].item() for t in tree.leaves(rows)]
            if i >= len(tokens):  # the padding: a segment of its own that predicts nothing
                assert got[0] == 0 and got[1] == IGNORED and got[2] == rows.segments[row].max()
                continue
            learn = i + 1 < len(tokens) and counts[i + 1] and segments[i + 1] == segments[i]
            assert got == [tokens[i], tokens[i + 1] if learn else IGNORED, segments[i] - segments[row * seq]]
    starts = {sum(lengths[:i]) for i in range(len(lengths))}
    wanted = [token for i, (token, count) in enumerate(zip(tokens, counts, strict=True)) if count and i not in starts]
    assert rows.targets[rows.targets != IGNORED].tolist() == wanted


def test_documents_of_text_end_once(tmp_path, folder):
    tokens, counts, lengths = documents(written(tmp_path / "a.jsonl", RECORDS), folder)
    eos = tokenizer.text(folder).eos
    assert lengths[2] == lengths[3] == 1 and lengths[0] == len("prompt th") + len("the answer") - 3 + 1 or lengths[0]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    assert all(tokens[start + length - 1] == eos for start, length in zip(starts[:5], lengths, strict=False))
    assert [counts[start + length - 1] for start, length in zip(starts, lengths, strict=True)] == [True] * 5 + [False]


def test_a_store_is_found_again_and_follows_its_sources(tmp_path, folder, monkeypatch):
    path = written(tmp_path / "a.jsonl", RECORDS)
    first = dataset.prepare(path, folder, 5)
    shutil.copy(path, tmp_path / "b.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(store.workers, "parts", lambda *args, **options: pytest.fail("tokenised again"))
        again, copy = dataset.prepare(path, folder, 7), dataset.prepare(tmp_path / "b.jsonl", folder, 5)
    assert again.parts == first.parts == copy.parts and again.seq == 7
    other = FAMILIES["ChatML"].folder(tmp_path / "other", chat_template="{{ messages[-1].content + eos_token }}")
    changed = [
        dataset.prepare(path, folder, 5, parse_special=True),
        dataset.prepare(path, folder, 5, template="zephyr"),
        dataset.prepare(written(tmp_path / "b.jsonl", RECORDS[::-1]), folder, 5),
    ]
    del other
    assert len({stored.parts[0].path for stored in [first, *changed]}) == 4
    (tokens,) = store.default_folder().glob(f"{first.parts[0].path.name}.tokens")
    store.opened.cache_clear()
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"tokens: has \d+ bytes, wanted \d+; remove .*json, and it is written again"):
        dataset.read(first)


def test_interrupted_and_refused_stores_leave_nothing(tmp_path, folder):
    path = written(tmp_path / "a.jsonl", [*RECORDS, {"text": 3}])
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"a.jsonl:7: text: got int, wanted text"):
        dataset.prepare(path, folder, 5, cache=cache)
    assert list(cache.iterdir()) == []


def test_weights_and_several_files(tmp_path, folder):
    texts = [[{"text": f"{name} {i}"} for i in range(40)] for name in "ab"]
    a, b = (written(tmp_path / f"{name}.jsonl", items) for name, items in zip("ab", texts, strict=True))
    one, two = dataset.prepare(a, folder, 4), dataset.prepare(b, folder, 4)
    both = dataset.prepare(f"{a}:2.5,{b}:0.25", folder, 4)
    n, m = len(one.rows), len(two.rows)
    count = lambda part: torch.bincount(both.rows[both.rows // dataset.ROW == part] % dataset.ROW, minlength=1)
    assert set(count(0).tolist()) == {2, 3} and count(0).sum() == 2 * n + round(n / 2)
    assert set(count(1).tolist()) == {0, 1} and count(1).sum() == round(m / 4)
    picked = dataset.take(both, torch.tensor([0, len(both.rows) - 1]))
    last = both.rows[-1].item() % dataset.ROW
    assert torch.equal(picked.tokens, torch.stack([dataset.read(one).tokens[0], dataset.read(two).tokens[last]]))
    train, held = dataset.divide(both, 9)
    assert not torch.isin(train.rows, held.rows).any() and len(held.rows.unique()) == len(held.rows) == 9


WRONG = {
    "shorter than a row": (
        [{"text": "abcd"}],
        5,
        r"a.jsonl: 5 tokens, wanted at least 6 \(--seq 5 .*use --seq 4 or less",
    ),
    "no length": ([{"text": "abcd"}], 0, "--seq: got 0, wanted at least 1"),
    "one token each": ([{"text": ""}] * 3, 2, "none of 3 tokens can be learnt; wanted outputs, assistant turns"),
    "kinds": (
        [{"text": "a"}, {"prompt": "a", "chosen": "b", "rejected": "c"}],
        2,
        "has records of the kinds documents",
    ),
}


@pytest.mark.parametrize("items, seq, message", WRONG.values(), ids=WRONG)
def test_prepare_refuses(tmp_path, folder, items, seq, message):
    with pytest.raises(ValueError, match=message):
        dataset.prepare(written(tmp_path / "a.jsonl", items), folder, seq)


def test_notes_are_said(tmp_path, folder):
    notes = []
    path = written(tmp_path / "a.jsonl", [{"text": "a <|im_end|> b", "id": 1}, {"text": "a<|im_end|>", "id": 2}])
    dataset.prepare(path, folder, 2, note=notes.append)
    said = "the special token <|im_end|> was typed and stays text (1 times)"
    assert notes == [f"{path}: the column 'id' is not read (2 times)", f"{path}: {said}"]


def test_preferences(tmp_path, folder):
    pairs = [{"prompt": "ask ", "chosen": "good" * i, "rejected": "bad"} for i in range(1, 6)]
    stored = dataset.prepare(written(tmp_path / "a.jsonl", pairs), folder, 12)
    found = dataset.take_preferences(stored, torch.tensor([0, 4]))
    tokens, _, lengths = documents(tmp_path / "a.jsonl", folder)
    at = sum(lengths[:8])  # of the last pair
    assert found.chosen.tokens[1].tolist() == tokens[at : at + 12]
    wanted = tokens[sum(lengths[:9]) :]
    assert found.rejected.tokens[1].tolist() == (wanted + [0] * 12)[:12]
    learnt = found.rejected.targets[1]
    assert learnt[learnt != IGNORED].tolist() == wanted[-len(learnt[learnt != IGNORED]) :]
    assert found.labels is None and found.rejected.segments.unique().tolist() == [0, 1]
    with pytest.raises(ValueError, match="the data are preferences .*; wanted chats, instructions or text"):
        dataset.take(stored, torch.tensor([0]))
    assert dataset.batch(stored, 0, 2, 0).rejected is not None
    labelled = [{"prompt": "a", "completion": f"b{i}", "label": i % 3 == 0} for i in range(7)]
    stored = dataset.prepare(written(tmp_path / "b.jsonl", labelled), folder, 12)
    found = dataset.take_preferences(stored, torch.arange(7))
    assert found.labels.tolist() == [i % 3 == 0 for i in range(7)] and found.rejected is None
    assert len({tuple(row) for row in found.chosen.tokens.tolist()}) == 7


def numbered(n):
    """Rows that differ."""
    row = torch.arange(n)[:, None].expand(n, 4)
    return Rows(row, row + 1000, row * 0)


def stored(n):
    return dataset.Stored(torch.arange(n), ())


@pytest.mark.parametrize("n, holdout", [(2, 1), (10, 1), (10, 3), (10, 9), (101, 16)])
def test_divide(n, holdout):
    train, held = dataset.divide(stored(n), holdout)
    a, b = train.rows.tolist(), held.rows.tolist()
    assert len(b) == holdout and sorted(a + b) == list(range(n)) and a == sorted(a) and b == sorted(b)
    gaps = {y - x for x, y in zip(b, b[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("holdout", [0, 5, -1])
def test_divide_refuses(holdout):
    with pytest.raises(ValueError, match=f"holdout: got {holdout} of 5 rows, wanted at least 1 and some left to train"):
        dataset.divide(stored(5), holdout)


@pytest.mark.parametrize("n, size", [(10, 4), (7, 7), (5, 12), (1, 3)])
def test_batches_visit_every_row_once_an_epoch(n, size):
    rows = numbered(n)
    seen = torch.cat([dataset.batch(rows, step, size, seed=3).tokens[:, 0] for step in range(n)])  # size epochs
    epochs = seen.reshape(size, n)
    assert torch.equal(epochs.sort(dim=1).values, torch.arange(n).expand(size, n))
    key = random.fold(random.key(3), "data")
    assert all(torch.equal(epoch, random.permutation(random.fold(key, i), n)) for i, epoch in enumerate(epochs))
    if n > 5:
        assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], torch.arange(n))


def test_a_batch_depends_on_step_and_seed_alone(tmp_path, folder):
    on_disk = dataset.prepare(written(tmp_path / "a.jsonl", [{"text": "abc " * 50}] * 4), folder, 4)
    for rows in (dataset.read(on_disk), on_disk):
        first = dataset.batch(rows, 7, 8, seed=0)
        dataset._order.cache_clear()
        torch.manual_seed(5)
        dataset.batch(rows, 8, 8, seed=0)
        for a, b in zip(tree.leaves(first), tree.leaves(dataset.batch(rows, 7, 8, seed=0)), strict=True):
            assert a.shape == (8, 4) and torch.equal(a, b)
        wide = dataset.batch(rows, 3, 16, seed=0).tokens  # a step of twice the batch is two steps
        assert torch.equal(wide, torch.cat([dataset.batch(rows, step, 8, seed=0).tokens for step in (6, 7)]))
    assert torch.equal(dataset.batch(on_disk, 5, 8, 1).tokens, dataset.batch(dataset.read(on_disk), 5, 8, 1).tokens)


def test_the_place_of_a_store_is_no_part_of_it():
    """Ranks on several machines compare what they train on, but not where it is."""
    parts = [(dataset.Part(folder / "x", "d"),) for folder in (store.default_folder(), store.Path("/elsewhere"))]
    a, b = (dataclasses.replace(stored(3), parts=part) for part in parts)
    assert repr(a.parts) == repr(b.parts) == "(Part(digest='d'),)" and a.parts == b.parts


def test_show(tmp_path, folder):
    path = written(tmp_path / "a.jsonl", RECORDS[::-1])
    rows = dataset.read(dataset.prepare(path, folder, 16))
    tok = tokenizer.read(folder)
    shown = [json.loads(line) for line in show.lines(rows, tok, 2)]
    assert "".join(shown[0]["tokens"] + shown[1]["tokens"]).startswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>ass"
    )
    for i, row in enumerate(shown):
        assert len(row["tokens"]) == len(row["counts"]) == 16 and row["counts"][0] is False
        assert row["counts"][1:] == (rows.targets[i, :-1] != IGNORED).tolist()
    text = show.text(rows, tok, 2)
    assert "row 1: " in text.plain and "<|im_end|>" in text.plain and "|" in text.plain
    styled = "".join(text.plain[span.start : span.end] for span in text.spans if span.style == show.COUNTS)
    assert styled.startswith("ho<|im_end|>") or "ho" in styled
