"""Read a tokenizer's own configuration: special tokens, what begins and ends a text, and chat templates.

    tokenizer.json                    the tokenizer, and its post-processor
    tokenizer_config.json             names of special tokens, chat_template
    special_tokens_map.json           names of special tokens, in older folders
    chat_template.jinja, additional_chat_templates/NAME.jinja    beat the key of the configuration
    config.json                       eos_token_id, if nothing above names an end of text

The post-processor decides whether a text begins with a token. ``add_bos_token`` and ``add_eos_token`` are not read:
transformers 5 ignores them beside a tokenizer.json, whose post-processor was written by them. All of this is what
transformers does with the same folder.
"""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
BUILT_IN = {"chatml": CHATML, "zephyr": ZEPHYR}


@dataclass(frozen=True)
class Text:
    """The configuration of a folder's tokenizer."""

    path: Path
    templates: dict[str, str]  # of chats, by name; empty: none
    variables: dict[str, str]  # the named special tokens
    specials: tuple[str, ...]  # the texts of all special tokens
    eos: int  # the token that ends a text
    begin: tuple[int, ...]  # the tokens that begin a text
    digest: str  # of all that

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; named special tokens are special in it, as in transformers."""
        return read(self.path.parent, self.variables)


def read(folder: str | Path, variables: dict[str, str] | None = None) -> Tokenizer:
    """Return the ``tokenizer.json`` in ``folder``, its truncation and padding switched off."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; wanted a tokenizer, copy it from where the model comes from")
    try:
        found = Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer: {error}; copy it again from where the model comes from") from error
    found.no_truncation()
    found.no_padding()
    added = {token.content for token in found.get_added_tokens_decoder().values() if token.special}
    names = dict.fromkeys((variables or {}).values())
    found.add_special_tokens([x for x in names if x not in added and found.token_to_id(x) is not None])
    return found


def files(folder: Path) -> list[Path]:
    """Return the paths of all files but ``config.json`` that :func:`text` reads, some of which may not be there."""
    return [folder / name for name in FILES] + sorted((folder / "additional_chat_templates").glob("*.jinja"))


def text(folder: str | Path, template: str | Path | None = None) -> Text:
    """Read the configuration in ``folder``; ``template`` replaces its chat template: a file, "chatml" or "zephyr".

    Raises ValueError for files that are missing or malformed, naming them.
    """
    folder = Path(folder)
    config = _json(folder / "tokenizer_config.json")
    variables = named(_json(folder / "special_tokens_map.json") | config)
    tokenizer = read(folder, variables)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    eos = tokenizer.token_to_id(variables["eos_token"]) if "eos_token" in variables else _end(folder)
    if eos is None or tokenizer.id_to_token(eos) is None:
        wanted = f"wanted one of its {tokenizer.get_vocab_size()}"
        raise ValueError(
            f"{folder}: the tokenizer has no token {variables.get('eos_token', eos)!r} to end a text; {wanted}"
        )
    variables = {"eos_token": str(tokenizer.id_to_token(eos))} | variables
    if variables["eos_token"] not in added:
        added.append(variables["eos_token"])
    begin = _begin(tokenizer)
    found = templates(folder, config) if template is None else {"default": _given(template, tokenizer)}
    content = [(folder / "tokenizer.json").read_text("utf-8"), found, variables, added, eos, begin]
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    return Text(folder / "tokenizer.json", found, variables, tuple(added), eos, begin, digest)


def templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder by name, as transformers finds them."""
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if (path := folder / "chat_template.jinja").is_file() or more:
        paths = ([("default", path)] if path.is_file() else []) + [(p.stem, p) for p in more]
        return {name: p.read_text("utf-8") for name, p in paths}
    match config.get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case [*entries] if all(isinstance(e, dict) and {"name", "template"} <= e.keys() for e in entries):
            return {str(entry["name"]): str(entry["template"]) for entry in entries}
        case other:
            wanted = "a text or a list of objects with name and template"
            raise ValueError(f"{folder}: chat_template: got {type(other).__name__}, wanted {wanted}")


def chosen(found: Collection[str], has_tools: bool) -> str:
    """Return the name of the template for a chat, as transformers chooses it; raise ValueError if there is none."""
    if not found:
        raise ValueError("the tokenizer has no chat template; pass one with --chat-template FILE, chatml or zephyr")
    name = "tool_use" if has_tools and "tool_use" in found else "default"
    if name not in found:
        have = ", ".join(sorted(found))
        raise ValueError(f"the tokenizer has the chat templates {have}, but none is default; pass one as a file")
    return name


def named(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that a configuration names."""
    extra = config.get("extra_special_tokens")
    out = {}
    for name, value in {**{k: config.get(k) for k in NAMED}, **(extra if isinstance(extra, dict) else {})}.items():
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            out[name] = value
        elif value is not None:
            raise ValueError(f"tokenizer_config.json: {name}: got {type(value).__name__}, wanted a token")
    return out


def _begin(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the post-processor writes before a text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
    return tuple(whole[: starts[-1]]) if starts else ()


def _given(template: str | Path, tokenizer: Tokenizer) -> str:
    if str(template) == "chatml" and None in map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>")):
        fix = "use zephyr, which needs an end of text alone, or a file"
        raise ValueError(f"--chat-template chatml: the tokenizer has no <|im_start|> and <|im_end|>; {fix}")
    if str(template) in BUILT_IN:
        return BUILT_IN[str(template)]
    if not Path(template).is_file():
        raise ValueError(f"--chat-template {template}: no such file; wanted a Jinja file, {' or '.join(BUILT_IN)}")
    return Path(template).read_text("utf-8")


def _end(folder: Path) -> int:
    eos = _json(folder / "config.json").get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(eos, int):
        fix = "name eos_token in tokenizer_config.json"
        raise ValueError(f"{folder / 'config.json'}: eos_token_id is {eos!r}; wanted the token that ends a text; {fix}")
    return eos


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}; copy it again from where the model comes from") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got {type(found).__name__}, wanted an object")
    return found
