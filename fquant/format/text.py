"""Formats from their text."""

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..tree import expect
from .definition import FORMER_NAMES, NAMED, Format, Vectors
from .known import FORMATS


@lru_cache(maxsize=256)
def read(text: str) -> Format:
    """Return the format whose ``text`` this is; raise ValueError for another text, TypeError for no text."""
    expect(isinstance(text, str), f"format: got {type(text).__name__}, wanted the text of a Format", TypeError)
    name, colon, block = text.partition(":")
    name = FORMER_NAMES.get(name, name)
    if name in NAMED and (not colon or (block.isascii() and block.isdecimal())):
        return replace(NAMED[name], block=int(block)) if colon else NAMED[name]
    try:
        return _from_dict(json.loads(text))
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"format {text!r} is unknown; wanted the text of a Format") from None


def _from_dict(parts: dict[str, Any]) -> Format:
    table, scale, vectors = parts["table"], parts["scale"], parts["vectors"]
    nested: dict[str, Any] = {"scale": scale and _from_dict(scale), "vectors": vectors and Vectors(**vectors)}
    return Format(**parts | nested | dict[str, Any](table=table and tuple(table)))


def parse(name: str, block: int | None = None) -> Format:
    """Return the format called ``name``, with another ``block`` if given; raise ValueError if there is none such."""
    name = FORMER_NAMES.get(name, name)
    expect(name in FORMATS, f"format {name!r} is unknown; wanted one of {', '.join(FORMATS)}")
    return FORMATS[name] if block is None else replace(FORMATS[name], block=block)
