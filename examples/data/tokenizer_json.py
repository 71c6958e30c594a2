"""A ``tokenizer.json`` in this process: a stranger's program, for the processes of ``workers.py``.

Its expressions may take any time, and its normalizers, which may be nested, any memory. A damaged file may end the
process, because tokenizers panics.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

NAME = "tokenizer.json"


def read(folder: str | Path, variables: dict[str, str] | None = None) -> Tokenizer:
    """Return the ``tokenizer.json`` in ``folder``, its truncation and padding switched off.

    The named tokens in ``variables`` are special in it, as in transformers.
    """
    path = Path(folder) / NAME
    if not path.is_file():
        raise ValueError(f"{NAME}: no such file; wanted a tokenizer, copy it from where the model comes from")
    try:
        found = Tokenizer.from_str(path.read_text("utf-8"))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # tokenizers raises nothing narrower, and its panic is no Exception
        raise ValueError(f"not a tokenizer: {error}; copy it again from where the model comes from") from error
    found.no_truncation()
    found.no_padding()
    added = {token.content for token in found.get_added_tokens_decoder().values() if token.special}
    names = dict.fromkeys((variables or {}).values())
    found.add_special_tokens([x for x in names if x not in added and found.token_to_id(x) is not None])
    return found


def facts(found: Tokenizer, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the special tokens of a tokenizer, the end and the beginning of a text, and which names it knows.

    ``asked`` has the name of the end of a text, or its number as a configuration gives it. The end is None if the
    tokenizer has no such token. Raises ValueError for a post-processor that writes unknown tokens.
    """
    size = found.get_vocab_size()
    eos = found.token_to_id(asked["eos"]) if isinstance(asked["eos"], str) else asked["eos"]
    eos = eos if eos is not None and 0 <= eos < 1 << 31 and found.id_to_token(eos) is not None else None
    plain, whole = (found.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    for token in whole:
        if found.id_to_token(token) is None:
            raise ValueError(f"post_processor: got the token {token}, wanted one of its {size}")
    starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
    return {
        "size": size,
        "eos": eos,
        "eos_text": None if eos is None else found.id_to_token(eos),
        "special": [token.content for token in found.get_added_tokens_decoder().values() if token.special],
        "begin": whole[: starts[-1]] if starts else [],
        "known": [name for name in asked["names"] if found.token_to_id(name) is not None],
    }


def chosen(found: Collection[str], has_tools: bool) -> str:
    """Return the name of the template for a chat, as transformers chooses it; raise ValueError if there is none."""
    if not found:
        raise ValueError("the tokenizer has no chat template; pass one with --chat-template FILE, chatml or zephyr")
    name = "tool_use" if has_tools and "tool_use" in found else "default"
    if name not in found:
        have = ", ".join(sorted(found))
        raise ValueError(f"the tokenizer has the chat templates {have}, but none is default; pass one as a file")
    return name
