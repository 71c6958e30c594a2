"""examples.common.data against loops that a reader can check: every token once, every target where it belongs."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.common import data
from examples.common.records import HEADERS, Document, Piece
from fquant import random, tree

EOS, BOS = 0, 1
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def build(*special):
    """A byte-level tokenizer of 256 letters and one merge, "t" + "h"."""
    vocab = {letter: i + 2 for i, letter in enumerate(ALPHABET)} | {"<eos>": EOS, "<bos>": BOS, "th": 258}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.add_special_tokens(["<eos>", "<bos>", *special])
    return tok


def document(*pieces, name="doc"):
    return Document(name, [Piece(text, flag) for text, flag in pieces])


def written(tok, ids):
    return [tok.id_to_token(i) for i in ids]


TOK = build()
DOCUMENTS = [
    document(("prompt th", False), ("the answer", True)),
    document(("plain", True)),
    document(("ask", False), ("say", True), ("more", False)),
    document(),
    document(("a long tail of text that is all target", True)),
]


@pytest.mark.parametrize("bos", [None, BOS])
def test_encode_against_a_loop(bos):
    corpus = data.encode(DOCUMENTS, TOK, EOS, bos)
    tokens, targets, segments = [], [], []
    for number, (_, pieces) in enumerate(DOCUMENTS):
        ids, flags = ([] if bos is None else [bos]), ([] if bos is None else [False])
        for text, flag in pieces:
            more = TOK.encode(text, add_special_tokens=False).ids
            ids, flags = ids + more, flags + [flag] * len(more)
        tokens += [*ids, EOS]
        targets += [*flags, bool(pieces) and pieces[-1][1]]
        segments += [number] * (len(ids) + 1)
    assert corpus.tokens.tolist() == tokens and corpus.tokens.dtype is torch.int32
    assert corpus.targets.tolist() == targets and corpus.targets.dtype is torch.bool
    assert corpus.segments.tolist() == segments and corpus.segments.dtype is torch.int32


def test_pieces_are_tokenised_apart():
    apart, joined = (
        data.encode([document(("t", False), ("h", True))], TOK, EOS),
        data.encode([document(("th", True))], TOK, EOS),
    )
    assert written(TOK, apart.tokens.tolist()) == ["t", "h", "<eos>"] and apart.targets.tolist() == [False, True, True]
    assert written(TOK, joined.tokens.tolist()) == ["th", "<eos>"]


ENCODE_WRONG = {
    "no documents": ([], EOS, "data: no documents; wanted at least one"),
    "no targets": ([document(("abc", False), name="f:1")], EOS, "f:1: no targets among 4 tokens; wanted text, outputs"),
    "unknown eos": (DOCUMENTS, 999, "eos: the tokenizer has no token 999; wanted one below 259"),
}


@pytest.mark.parametrize("documents, eos, message", ENCODE_WRONG.values(), ids=ENCODE_WRONG)
def test_encode_refuses(documents, eos, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        data.encode(documents, TOK, eos)


@pytest.mark.parametrize("seq", [1, 2, 5, 16, 33, 73])
@pytest.mark.parametrize("bos", [None, BOS])
def test_pack_against_a_loop(seq, bos):
    corpus = data.encode(DOCUMENTS, TOK, EOS, bos)
    tokens, targets, segments = corpus.tokens.tolist(), corpus.targets.tolist(), corpus.segments.tolist()
    rows = data.pack(corpus, seq)
    assert {t.dtype for t in tree.leaves(rows)} == {torch.int64}
    assert {t.shape for t in tree.leaves(rows)} == {(-(-(len(tokens) - 1) // seq), seq)}
    for row in range(len(rows.tokens)):
        for column in range(seq):
            i, got = row * seq + column, [t[row, column].item() for t in tree.leaves(rows)]
            if i >= len(tokens):  # the padding: a segment of its own that predicts nothing
                assert got == [0, data.IGNORED, segments[-1] + 1 - segments[row * seq]]
                continue
            learn = i + 1 < len(tokens) and targets[i + 1] and segments[i + 1] == segments[i]
            assert got == [tokens[i], tokens[i + 1] if learn else data.IGNORED, segments[i] - segments[row * seq]]


def test_every_target_is_predicted_once():
    corpus = data.encode(DOCUMENTS, TOK, EOS, BOS)
    for seq in (3, 7, 50):
        kept = data.pack(corpus, seq).targets
        assert kept[kept != data.IGNORED].tolist() == corpus.tokens[corpus.targets].tolist()


def test_data_of_exactly_one_row():
    corpus = data.encode([document(("abcd", True))], TOK, EOS)
    rows = data.pack(corpus, 4)
    assert written(TOK, rows.tokens[0].tolist()) == ["a", "b", "c", "d"]
    assert written(TOK, rows.targets[0].tolist()) == ["b", "c", "d", "<eos>"]
    assert rows.segments.tolist() == [[0] * 4]


PACK_WRONG = {
    "shorter than a row": (
        "abcd",
        5,
        "doc: 5 tokens, wanted at least 6 (--seq 5 and one to predict); use --seq 4 or less",
    ),
    "one token": ("", 1, "doc: 1 tokens, wanted at least 2 (--seq 1 and one to predict); use more data"),
    "no length": ("abcd", 0, "--seq: got 0, wanted at least 1"),
}


@pytest.mark.parametrize("text, seq, message", PACK_WRONG.values(), ids=PACK_WRONG)
def test_pack_refuses(text, seq, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        data.pack(data.encode([document((text, True))], TOK, EOS), seq)


def test_pack_refuses_documents_of_one_token():
    with pytest.raises(ValueError, match="none of 3 tokens can be predicted"):
        data.pack(data.encode([document(("", True))] * 3, TOK, EOS), 2)


def numbered(n):
    """Rows that can be told apart."""
    row = torch.arange(n)[:, None].expand(n, 4)
    return data.Rows(row, row + 1000, row * 0)


@pytest.mark.parametrize("n, holdout", [(2, 1), (10, 1), (10, 3), (10, 9), (101, 16)])
def test_split(n, holdout):
    train, held = data.split(numbered(n), holdout)
    a, b = train.tokens[:, 0].tolist(), held.tokens[:, 0].tolist()
    assert len(b) == holdout and sorted(a + b) == list(range(n)) and a == sorted(a) and b == sorted(b)
    assert train.targets[:, 0].tolist() == [i + 1000 for i in a]
    gaps = {y - x for x, y in zip(b, b[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("holdout", [0, 5, -1])
def test_split_refuses(holdout):
    with pytest.raises(
        ValueError, match=f"holdout: got {holdout} of 5 rows, wanted at least 1 and some left to train on"
    ):
        data.split(numbered(5), holdout)


@pytest.mark.parametrize("n, size", [(10, 4), (7, 7), (5, 12), (1, 3)])
def test_batches_visit_every_row_once_an_epoch(n, size):
    rows = numbered(n)
    seen = torch.cat([data.batch(rows, step, size, seed=3).tokens[:, 0] for step in range(n)])  # n * size: size epochs
    epochs = seen.reshape(size, n)
    assert torch.equal(epochs.sort(dim=1).values, torch.arange(n).expand(size, n))
    key = random.fold(random.key(3), "data")
    assert all(torch.equal(epoch, random.permutation(random.fold(key, i), n)) for i, epoch in enumerate(epochs))
    if n > 5:
        assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], torch.arange(n))


def test_a_batch_depends_on_step_and_seed_alone():
    rows = numbered(50)
    first = data.batch(rows, 7, 8, seed=0)
    torch.manual_seed(5)
    data.batch(rows, 8, 8, seed=0)
    for a, b in zip(tree.leaves(first), tree.leaves(data.batch(rows, 7, 8, seed=0)), strict=True):
        assert a.shape == (8, 4) and torch.equal(a, b)
    assert not torch.equal(first.tokens, data.batch(rows, 7, 8, seed=1).tokens)
    wide = data.batch(rows, 3, 16, seed=0).tokens  # a step of twice the batch is two steps
    assert torch.equal(wide, torch.cat([data.batch(rows, step, 8, seed=0).tokens for step in (6, 7)]))


def test_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file; wanted a tokenizer, copy it from"):
        data.tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    for bad in ("{}", "not JSON", '{"version": "1.0"}'):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer: .*; copy it again from"):
            data.tokenizer(tmp_path)
    cut = build()
    cut.enable_truncation(2)
    cut.enable_padding(length=20)
    path.write_text(cut.to_str())
    assert data.tokenizer(tmp_path).encode("abcdef").ids == TOK.encode("abcdef").ids


def test_documents_use_the_template_that_the_tokenizer_knows(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    assert data.documents(path, TOK, 1)[0].pieces[0].text == "### User\n\na\n\n### Assistant\n\n"
    llama = build(*HEADERS)
    found = data.documents(path, llama, 1)
    assert found[0].pieces[1] == ("b<|eot_id|>", True)
    corpus = data.encode(found, llama, EOS, BOS)
    kept = [token for token, flag in zip(corpus.tokens.tolist(), corpus.targets.tolist(), strict=True) if flag]
    assert written(llama, kept) == ["b", "<|eot_id|>", "<eos>"]
    assert written(llama, corpus.tokens[:2].tolist()) == ["<bos>", "<|start_header_id|>"]
    assert "argparse.py" in [name for name, _ in data.documents(None, TOK, 10**9)]


def test_special_tokens_come_from_the_config(tmp_path):
    for config, wanted in (({"eos_token_id": 2}, (2, None)), ({"eos_token_id": [3, 4], "bos_token_id": 3}, (3, 3))):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert data.special(tmp_path) == wanted
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json: eos_token_id is None; wanted the id"):
        data.special(tmp_path)


def test_some_of_the_documents():
    documents = [Document(str(i), [Piece("x" * 10, True)]) for i in range(100)]
    assert [d.name for d in data.some(documents, 200)] == [str(i) for i in range(0, 100, 5)]
    assert data.some(documents, 10**9) == documents
