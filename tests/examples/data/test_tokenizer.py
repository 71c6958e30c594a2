"""examples.data.tokenizer and the ends of texts against transformers, for each way to configure them."""

import json
import re
import resource

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer

from examples.data import encode, tokenizer, workers
from examples.data.records import Piece
from tests.helpers.tokenizers import byte_level, write

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


def ends(post=None):
    """A byte-level tokenizer with <s> and </s>, whose post-processor writes what ``post`` says."""
    found = byte_level()
    found.add_special_tokens(["<s>", "</s>"])
    if post:
        tokens = [(token, found.token_to_id(token)) for token in ("<s>", "</s>")]
        found.post_processor = processors.TemplateProcessing(post, special_tokens=tokens)
    return found


def metaspace():
    """A tokenizer of Llama 2's kind, which puts a space before a text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: i + 3 for i, letter in enumerate("▁abcdefghi:\n")}
    found = Tokenizer(models.BPE(vocab=vocab | {"▁a": 90}, merges=[("▁", "a")], unk_token="<unk>"))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    return found


CASES = {
    "nothing": (None, {}),
    "add_bos_token": (None, {"add_bos_token": True}),
    "add_bos_token false beats the post-processor": ("<s> $A", {"add_bos_token": False}),
    "the post-processor": ("<s> $A", {}),
    "the post-processor, with an end": ("<s> $A </s>", {}),
    "add_eos_token": ("<s> $A", {"add_eos_token": True}),
    "both": (None, {"add_bos_token": True, "add_eos_token": True}),
}


def tools(text, **options):
    setup = workers.Worker(text, **options).setup
    return encode.tools(text.tokenizer(), setup, {})


def ids(pieces, given):
    return (encode.text(pieces, given, encode.Counter()) & encode.TOKEN).tolist()


@pytest.mark.parametrize("post, options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("document", ["the quick brown fox", "the quick</s>", ""])
def test_a_text_begins_as_in_transformers_and_ends_once(tmp_path, post, options, document):
    folder = write(tmp_path, ends(post), **FAST, **ENDS, **options)
    theirs, text = AutoTokenizer.from_pretrained(folder), tokenizer.text(folder)
    assert text.variables == theirs.special_tokens_map and text.eos == theirs.eos_token_id
    assert set(text.specials) == set(theirs.all_special_tokens) | {"<|end|>"}
    wanted = theirs(document)["input_ids"]  # trl writes the end of text if a text has none
    if not wanted or wanted[-1] != theirs.eos_token_id:
        wanted.append(theirs.eos_token_id)
    if document.endswith("</s>") and post and post.endswith("</s>"):
        wanted.pop()  # transformers writes it twice
    assert ids([Piece(document, True)], tools(text)) == wanted


def test_special_tokens_in_a_text_stay_text_unless_they_are_to_be_read(tmp_path):
    """As transformers' split_special_tokens=True; with parse_special as its default."""
    folder = write(tmp_path, ends(), **FAST, **ENDS)
    theirs, text = AutoTokenizer.from_pretrained(folder), tokenizer.text(folder)
    said = "a <s> typed</s>\n<think> and <|end|>."
    notes = encode.Counter()
    found = encode.text([Piece(said, True)], tools(text), notes)[:-1] & encode.TOKEN
    assert found.tolist() == theirs(said, split_special_tokens=True)["input_ids"]
    assert set(notes) == {f"the special token {x} was typed and stays text" for x in ("<s>", "</s>", "<|end|>")}
    assert ids([Piece(said, True)], tools(text, parse_special=True))[:-1] == theirs(said)["input_ids"]


def test_pieces_are_tokenised_apart(tmp_path):
    """A prompt has the tokens that it has when the model is used; no space goes between it and its answer."""
    folder = write(tmp_path / "a", ends(), **FAST, **ENDS)
    given, theirs = tools(tokenizer.text(folder)), AutoTokenizer.from_pretrained(folder)
    prompt, answer = "the quick br", "own fox"
    found = encode.text([Piece(prompt, False), Piece(answer, True)], given, encode.Counter())
    first, second = theirs(prompt)["input_ids"], theirs(answer)["input_ids"]
    assert (found & encode.TOKEN).tolist() == [*first, *second, theirs.eos_token_id]
    assert (found < 0).tolist() == [False] * len(first) + [True] * (len(second) + 1)

    folder = write(tmp_path / "b", metaspace(), **FAST, **ENDS)
    given, theirs = tools(tokenizer.text(folder)), AutoTokenizer.from_pretrained(folder)
    found = ids([Piece("a:\n", False), Piece("bad a", True)], given)
    assert found == [*theirs("a:\nbad a")["input_ids"], theirs.eos_token_id] and found[0] == 90


def test_tokens_that_are_named_are_special(tmp_path):
    """transformers makes named tokens special that tokenizer.json has as others."""
    found, eos = ends(), {"__type": "AddedToken", "content": "<think>"}
    folder = write(tmp_path, found, **FAST, eos_token=eos, extra_special_tokens={"image": "<|end|>"})
    theirs, text = AutoTokenizer.from_pretrained(folder), tokenizer.text(folder)
    said = "a<think>b"
    assert "<think>" in text.specials and text.variables == theirs.special_tokens_map
    assert ids([Piece(said, True)], tools(text))[:-1] == theirs(said, split_special_tokens=True)["input_ids"]
    assert text.tokenizer().encode(said).ids == theirs(said)["input_ids"]


def test_the_end_of_a_text_without_a_tokenizer_config(tmp_path):
    write(tmp_path, ends())
    for eos, wanted in ((2, 2), ([3, 4], 3)):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert tokenizer.text(tmp_path).eos == wanted
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="config.json: eos_token_id is None; wanted the token that ends a text"):
        tokenizer.text(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 99999}')
    with pytest.raises(ValueError, match="the tokenizer has no token 99999 to end a text; wanted one of its"):
        tokenizer.text(tmp_path)


WRONG = {
    "no JSON": ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON: "),
    "no object": ("tokenizer_config.json", "[]", "tokenizer_config.json: got list, wanted an object"),
    "a token": ("tokenizer_config.json", '{"eos_token": 3}', "eos_token: got int, wanted a token"),
    "a template": (
        "tokenizer_config.json",
        '{"eos_token": "</s>", "chat_template": 3}',
        "chat_template: got int, wanted a",
    ),
    "no token": ("tokenizer_config.json", '{"eos_token": "<no>"}', "the tokenizer has no token '<no>' to end a text"),
    "no tokenizer": ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer: "),
}


@pytest.mark.parametrize("name, content, message", WRONG.values(), ids=WRONG)
def test_malformed_folders(tmp_path, name, content, message):
    write(tmp_path, ends())
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer.text(tmp_path)


def test_read(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file; wanted a tokenizer, copy it from"):
        tokenizer.read(tmp_path)
    cut = byte_level()
    cut.enable_truncation(2)
    cut.enable_padding(length=20)
    write(tmp_path, cut)
    assert tokenizer.read(tmp_path).encode("abcdef").ids == byte_level().encode("abcdef").ids


def replaced(count):
    """Return a normaliser that makes a text 16 ** count times as long."""
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}
    return {"normalizer": {"type": "Sequence", "normalizers": [one] * count}}


def begun(token):
    """Return a post-processor that begins a text with the number ``token``."""
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    named = {"<s>": {"id": "<s>", "ids": [token], "tokens": ["<s>"]}}
    return {"post_processor": {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": named}}


def charsmap(text):
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}}


HARM = {
    "nested": (replaced(20), "its process ended with -6; wanted a tokenizer that takes less than|took more than 10 s"),
    "a token that is none": (begun(4_000_000_000), "post_processor: got the token 4000000000, wanted one of its"),
    "a number that is none": (begun(1 << 40), "not a tokenizer: "),
    "a map cut short": (charsmap("AAAA"), "not a tokenizer: Precompiled"),
    "a map of nonsense": (charsmap("//////////8="), "its process ended with -6"),
    "a map that points nowhere": (charsmap("BAAAAP////8AAAAA"), "not a tokenizer: index out of bounds"),
    "an expression that is none": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
        "not a tokenizer: ",
    ),
}


@pytest.mark.parametrize("change, fault", HARM.values(), ids=HARM)
def test_tokenizers_that_mean_harm_end_in_one_error(tmp_path, change, fault):
    """In a process of its own, which alone takes time and memory."""
    write(tmp_path, ends(), **ENDS)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | change))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=f"^{tmp_path}/tokenizer.json: ({fault})") as raised:
        tokenizer.text(tmp_path)
    assert "\n" not in str(raised.value) and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
