"""The chat template of a tokenizer, rendered in a sandbox: messages to text.

A template is ``chat_template.jinja``, or the key ``chat_template`` of ``tokenizer_config.json``: a text, or a list of
named ones, of which "default" is taken. The environment is that of transformers' ``chat_template_utils``.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def render(folder: Path, messages: Sequence[dict[str, Any]]) -> str:
    """Return the text of ``messages`` up to where the assistant's answer begins.

    Raises ValueError for a tokenizer without a template, and for a template that cannot be read or that refuses.
    """
    config = tokenizer_config(folder)
    source = _template(folder, config)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    tokens = {name: text for name in SPECIAL if (text := special_token(config, name)) is not None}
    try:
        template = environment.from_string(source)
        return template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **tokens)
    except jinja2.TemplateError as error:
        raise ValueError(f"{folder}: the chat template: {error}; correct the messages, or the template") from None


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, or nothing if there is none; raise ValueError for a file that is no object."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got {type(found).__name__}, wanted an object")
    return found


def special_token(config: dict[str, Any], name: str) -> str | None:
    """Return the text of a special token by its name, None if there is none."""
    found = config.get(name)
    text = found.get("content") if isinstance(found, dict) else found
    return text if isinstance(text, str) else None


def _template(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    found: Any = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        fix = "use --prompt with text as the model expects it, or add chat_template.jinja"
        raise ValueError(f"{folder}: the tokenizer has no chat template; {fix}")
    return found.removesuffix("\n")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
