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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fquant.io.files.reading import inside, read_text
from fquant.tree import at

from . import workers
from .tokenizer_json import NAME, read
from .tokenizer_json import chosen as chosen

MOST = 1 << 27  # bytes of tokenizer.json
FILES = (NAME, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
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
TURNS = ("<|im_start|>", "<|im_end|>")  # ChatML's


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
        """Return the tokenizer in this process, whose time and memory it may take; programs use ``workers.Worker``."""
        return read(self.path.parent, self.variables)


def files(folder: Path) -> list[Path]:
    """Return the paths of all files but ``config.json`` that :func:`text` reads, some of which may not be there."""
    return [folder / name for name in FILES] + sorted((folder / "additional_chat_templates").glob("*.jinja"))


def text(folder: str | Path, template: str | Path | None = None) -> Text:
    """Read the configuration in ``folder``; ``template`` replaces its chat template: a file, "chatml" or "zephyr".

    Raises ValueError for files that are missing or malformed, naming them.
    """
    folder = Path(folder)
    config = settings(folder / "tokenizer_config.json")
    with at(str(folder)):
        variables = named(settings(folder / "special_tokens_map.json") | config)
    path = _file(folder)
    source, eos = read_text(path, MOST), variables["eos_token"] if "eos_token" in variables else _end(folder)
    found = workers.facts(path, hashlib.blake2b(source.encode()).digest(), tuple(variables.items()), eos, TURNS)
    if found["eos"] is None:
        fault = f"{folder}: the tokenizer has no token {eos!r:.80} to end a text"
        raise ValueError(f"{fault}; wanted one of its {found['size']}")
    variables = {"eos_token": found["eos_text"]} | variables
    added = [*found["special"], *({variables["eos_token"]} - set(found["special"]))]
    many = templates(folder, config) if template is None else {"default": _given(template, found["known"])}
    content = [source, many, variables, added, found["eos"], found["begin"]]
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    return Text(path, many, variables, tuple(added), found["eos"], tuple(found["begin"]), digest)


def vocabulary(folder: str | Path) -> dict[str, int]:
    """Return the number of each token of the tokenizer in ``folder``."""
    return workers.vocabulary(_file(Path(folder)))


def templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder by name, as transformers finds them."""
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if found := {name: read_text(path) for name, path in paths.items() if inside(path, folder).exists()}:
        return found
    match config.get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case [*entries] if all(
            isinstance(e, dict) and {type(e.get(key)) for key in ("name", "template")} == {str} for e in entries
        ):
            return {entry["name"]: entry["template"] for entry in entries}
        case other:
            wanted = "a text or a list of objects with name and template"
            raise ValueError(f"{folder}: chat_template: got {type(other).__name__}, wanted {wanted}")


def named(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that a configuration names."""
    extra = config.get("extra_special_tokens")
    out = {}
    for name, value in {**{k: config.get(k) for k in NAMED}, **(extra if isinstance(extra, dict) else {})}.items():
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            out[name] = value
        elif value is not None:
            raise ValueError(f"{name:.80}: got {type(value).__name__}, wanted a token")
    return out


def settings(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a folder, {} if it is missing; raise ValueError, naming it, for others."""
    text = read_text(path) if inside(path).exists() else "{}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}; copy it again from where the model comes from") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got {type(found).__name__}, wanted an object")
    return found


def _file(folder: Path) -> Path:
    if not (path := inside(folder / NAME)).exists():
        raise ValueError(f"{path}: no such file; wanted a tokenizer, copy it from where the model comes from")
    return path


def _given(template: str | Path, known: list[str]) -> str:
    if str(template) == "chatml" and len(known) < len(TURNS):
        fix = "use zephyr, which needs an end of text alone, or a file"
        raise ValueError(f"--chat-template chatml: the tokenizer has no <|im_start|> and <|im_end|>; {fix}")
    if str(template) in BUILT_IN:
        return BUILT_IN[str(template)]
    if not Path(template).is_file():
        raise ValueError(f"--chat-template {template}: no such file; wanted a Jinja file, {' or '.join(BUILT_IN)}")
    return read_text(Path(template))


def _end(folder: Path) -> int:
    eos = settings(folder / "config.json").get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if type(eos) is not int:
        fault = f"{folder / 'config.json'}: eos_token_id is {eos!r:.80}; wanted the token that ends a text"
        raise ValueError(f"{fault}; name eos_token in tokenizer_config.json")
    return eos
