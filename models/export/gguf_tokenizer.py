"""The tokenizer of a Hugging Face folder as values of a GGUF: byte-level BPE, as Llama 3, Qwen and GPT-2 have.

``tokenizer.json`` gives the vocabulary, the merges and the added tokens. ``tokenizer_config.json``, if it is there,
names the special tokens and the chat template; ``chat_template.jinja`` replaces the latter. Templates are copied as
text, and never run.

llama.cpp has no regular expressions of its own for splitting: ``tokenizer.ggml.pre`` names a splitter that is compiled
in. :data:`SPLITTERS` maps the expression of a folder to that name. Any other expression, normaliser or kind of model is
refused by name, because another splitter would give other tokens.
"""

import json
from pathlib import Path
from typing import Any

from fquant.io.files.reading import inside, json_object, read_text
from fquant.io.gguf_writer import Value
from fquant.tree import at, expect

TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
MAX_BYTES = 1 << 27  # of tokenizer.json
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's llama_token_type
_COMMON = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SPLITTERS: dict[str | None, str] = {  # expression -> tokenizer.ggml.pre; None: that of ByteLevel itself
    None: "gpt-2",
    _WORDS + r"|\p{N}{1,3}" + _COMMON: "llama-bpe",
    _WORDS + r"|\p{N}" + _COMMON: "qwen2",
}
WHOLE_FIRST = "llama-bpe"  # the splitter with which llama.cpp looks a whole word up before it merges
SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
           "pad_token": "padding_token_id"}  # fmt: skip


def tokenizer_values(folder: str | Path, vocab: int) -> dict[str, Value]:
    """Return the values of the tokenizer in ``folder`` for a model of ``vocab`` rows; unused rows get a placeholder.

    Raises ValueError that names the file, for a tokenizer that llama.cpp does not have.
    """
    folder = Path(folder)
    fault = f"{folder / TOKENIZER}: no such file; give a folder with a {TOKENIZER}"
    expect(inside(folder / TOKENIZER).exists(), fault)
    content = json_object(folder / TOKENIZER, most=MAX_BYTES)
    with at(str(folder / TOKENIZER)):
        model: Any = content.get("model")
        expect(isinstance(model, dict), f"model: got {model!r:.80}, wanted an object; fetch the file again")
        splitter = _splitter(content, model)
        tokens, types = _tokens(model, content.get("added_tokens") or [], vocab)
        values: dict[str, Value] = {"model": "gpt2", "pre": splitter, "tokens": tokens, "token_type": types}
        merges = _merges(model.get("merges"))
        if merges:
            values["merges"] = merges
        first = _first_special(content.get("post_processor"))
    options = json_object(folder / TOKENIZER_CONFIG) if inside(folder / TOKENIZER_CONFIG).exists() else {}
    with at(str(folder / TOKENIZER_CONFIG)):
        for name, key in SPECIAL.items():
            if (token := _token_of(options.get(name), name)) is not None:
                expect(token in tokens, f"{name}: got {token!r:.80}, which is no token of {TOKENIZER}; correct it")
                values[key] = tokens.index(token)
        begins = options.get("add_bos_token", first is not None and first == _token_of(options.get("bos_token"), ""))
        expect(isinstance(begins, bool), f"add_bos_token: got {begins!r:.80}, wanted true or false")
        values["add_bos_token"] = begins
        values["add_eos_token"] = options.get("add_eos_token") is True
        template = options.get("chat_template")
        if inside(folder / TEMPLATE).exists():
            template = read_text(folder / TEMPLATE)
        expect(isinstance(template, str | None), "chat_template: got several, wanted one text; keep the default one")
    out = {f"tokenizer.ggml.{key}": item for key, item in values.items()}
    return out if template is None else out | {"tokenizer.chat_template": template}


def _splitter(content: dict[str, Any], model: dict[str, Any]) -> str:
    """Return llama.cpp's name of the splitter; raise ValueError for a tokenizer that it does not have."""
    wanted = "llama.cpp's kinds known here are byte-level BPE; leave the tokenizer out"
    expect(model.get("type") == "BPE", f"model.type = {model.get('type')!r:.80} is not supported; {wanted}")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        expect(not model.get(key), f"model.{key} = {model.get(key)!r:.80} is not supported; {wanted}")
    expect(not model.get("byte_fallback"), f"model.byte_fallback = True is not supported; {wanted}")
    normalizer: Any = content.get("normalizer")
    known = normalizer is None or normalizer == {"type": "NFC"}  # llama.cpp's qwen2 leaves NFC to the caller
    expect(known, f"normalizer = {normalizer!r:.80} is not supported; {wanted}")
    pre: Any = content.get("pre_tokenizer")
    kind = lambda part: part.get("type") if isinstance(part, dict) else None
    parts = pre.get("pretokenizers") if kind(pre) == "Sequence" else [pre]  # type: ignore[union-attr]
    expect(isinstance(parts, list) and parts, f"pre_tokenizer = {pre!r:.80} is not supported; {wanted}")
    *splits, last = parts
    known = kind(last) == "ByteLevel" and not last.get("add_prefix_space") and len(splits) < 2
    expect(known, f"pre_tokenizer = {pre!r:.200} is not supported; {wanted}")
    expression = None
    if splits:
        expression = _expression(splits[0])
    known = expression in SPLITTERS and bool(last.get("use_regex", True)) == (expression is None)
    fault = f"pre_tokenizer: the expression {expression!r:.200} is none of llama.cpp's known here"
    expect(known, f"{fault}; want that of {', '.join(SPLITTERS.values())}, or leave the tokenizer out")
    name = SPLITTERS[expression]
    whole = bool(model.get("ignore_merges"))
    fault = f"model.ignore_merges = {whole}, but llama.cpp's {name} assumes {not whole}"
    expect(whole == (name == WHOLE_FIRST), f"{fault}; leave the tokenizer out")
    return name


def _expression(split: Any) -> str:
    """Return the expression of a Split whose matches are isolated."""
    match split:
        case {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated", **rest}:
            expect(not rest.get("invert"), "pre_tokenizer.invert = True is not supported; leave the tokenizer out")
            return expression
    raise ValueError(f"pre_tokenizer = {split!r:.200} is not supported; leave the tokenizer out")


def _tokens(model: dict[str, Any], added: Any, vocab: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of every row of the embedding."""
    found: dict[int, tuple[str, int]] = {}
    entries: Any = model.get("vocab")
    expect(isinstance(entries, dict) and isinstance(added, list), "got no vocabulary; fetch the file again")
    for text, index in entries.items():
        _put(found, index, text, NORMAL, vocab)
    for item in added:
        fits = isinstance(item, dict) and isinstance(item.get("content"), str)
        expect(fits, f"added_tokens: got {item!r:.80}, wanted an object with a content; fetch the file again")
        index: Any = item.get("id")
        text = item["content"]
        if type(index) is int and found.get(index, (text, 0))[0] == text:
            found.pop(index, None)
        _put(found, index, text, CONTROL if item.get("special") else USER_DEFINED, vocab)
    rows = [found.get(index, (f"[PAD{index}]", UNUSED)) for index in range(vocab)]
    return [text for text, _ in rows], [kind for _, kind in rows]


def _put(found: dict[int, tuple[str, int]], index: Any, text: str, kind: int, vocab: int) -> None:
    fits = type(index) is int and 0 <= index < vocab
    expect(fits, f"token {text!r:.80} has number {index!r:.80}, wanted 0 to {vocab - 1}; use this model's tokenizer")
    expect(index not in found, f"tokens {text!r:.80} and {found.get(index, ('',))[0]!r:.80} have number {index}")
    found[index] = (text, kind)


def _merges(merges: Any) -> list[str]:
    """Return the merges as texts of two parts; newer files have them as pairs."""
    expect(isinstance(merges, list), "model.merges: got no list; fetch the file again")
    is_pair = lambda one: isinstance(one, list) and all(isinstance(part, str) for part in one)
    out: list[Any] = [" ".join(one) if is_pair(one) else one for one in merges]
    wrong = [one for one in out if not isinstance(one, str) or one.count(" ") != 1]
    expect(not wrong, f"model.merges: got {wrong[:1]!r:.80}, wanted two parts with a space between")
    return out


def _first_special(post: Any) -> str | None:
    """Return the token that the post-processor puts in front of a text, or None."""
    match post:
        case {"type": "Sequence", "processors": [*parts]}:
            return next((found for part in parts if (found := _first_special(part)) is not None), None)
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": str(token)}}, *_]}:
            return token
    return None


def _token_of(item: Any, name: str) -> str | None:
    text = item.get("content") if isinstance(item, dict) else item
    expect(isinstance(text, str | None), f"{name}: got {json.dumps(item)[:80]}, wanted a text; correct it")
    return text
