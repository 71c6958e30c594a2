"""Render a chat, and find the characters that its assistant writes.

    template with {% generation %}   the tag's spans, as in transformers' return_assistant_tokens_mask
    any other                        turn i is from render(turns[:i], with the prompt) to render(turns[:i + 1])

The token that ends a turn counts; text behind it, such as ChatML's newline, does not. In the second case a turn counts
only if the whole chat begins with both texts. Qwen3's template, for example, writes earlier turns without the empty
thought that it writes in the last one: there only the last turn counts, and the others are reported as skipped.
"""

import bisect
import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jinja2

from .sandbox import END, START, Span, Template

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same thing, in transformers too

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]


class Chat(NamedTuple):
    """A rendered chat: pieces of text, spans of characters that count, and turns that cannot count."""

    pieces: list[tuple[str, bool]]  # True: special tokens in this piece stay text
    spans: list[Span]  # in the joined pieces
    skipped: int  # assistant turns that the template rewrites
    ended: bool  # each turn that counts ends in a special token that counts


def chat(template: Template, messages: list[Message], first: int = 0, prompt: bool = False, **values: Any) -> Chat:
    """Render a chat whose assistant turns count from turn ``first`` on; with ``prompt`` an answer begins, none counts.

    ``values`` are further variables of the template, such as tools. Raises ValueError or jinja2.TemplateError.
    """
    messages = normal(messages, template.takes_parts)
    if template.is_special_in([messages, values]):
        messages, values = template.mark(messages), template.mark(values)
    whole = template.text(messages, prompt, **values)
    if prompt:
        spans, skipped, ended = [], 0, True
    elif template.has_tag and not first:
        spans, skipped = [(a, b) for a, b in template.tracker.spans if a < b], 0  # type: ignore[attr-defined]
        if not spans:
            raise ValueError("its {% generation %} tag marks nothing in this chat")
        ended = _are_ended(template, lambda turns: template.text(turns, False, **values), messages, whole, spans)
    else:
        render: Render = lambda turns, prompt: template.text(turns, prompt, **values)
        spans, skipped, ended = turns(template, render, messages, whole, first)
    unmarked = lambda x: x - whole.count(START, 0, x) - whole.count(END, 0, x)
    return Chat(template.pieces(whole), [(unmarked(a), unmarked(b)) for a, b in spans], skipped, ended)


def normal(messages: list[Message], takes_parts: bool) -> list[Message]:
    """Return messages without null values, reasoning under each of its names, and parts joined unless they are read."""
    out = []
    for number, message in enumerate(messages):
        message = {key: value for key, value in message.items() if value is not None}
        if (thought := next((message[key] for key in REASONING if key in message), None)) is not None:
            message = {"thinking": thought, **message, "reasoning_content": thought}
        if isinstance(parts := message.get("content"), list):
            for part in parts:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                    raise ValueError(f"messages.{number}.content: got a part of type {kind!r}, wanted parts of text")
            if not takes_parts:
                message["content"] = "".join(part["text"] for part in parts)
        out.append(message)
    return out


def _are_ended(template: Template, render: Callable[[list[Message]], str], messages: list[Message], whole: str, spans):
    """Return True if the last span of each turn ends in a special token, or within one, which then counts."""
    ended = []
    for a, b in spans:
        b = a + len(whole[a:b].rstrip())
        found = template.special.finditer(whole, a, b + max(map(len, template.specials), default=0))
        ended.append(any(match.start() < b <= match.end() for match in found))
    if all(ended):
        return True
    limits = []  # where turns end, which may have several spans
    for i in range(len(messages) - 1):
        with contextlib.suppress(jinja2.TemplateError):  # of templates that want a user's turn first
            limits.append(len(os.path.commonprefix([render(messages[: i + 1]), whole])))
    last = {bisect.bisect_right(limits, a): end for (a, _), end in sorted(zip(spans, ended, strict=True), key=_end)}
    return all(last.values())


def _end(span: tuple[Span, bool]) -> int:
    return span[0][1]


def turns(template: Template, render: Render, messages: list[Message], whole: str, first: int):
    """Return the spans of assistant turns by prefixes, the number of those without, and whether all have an end."""
    spoken = [i for i, message in enumerate(messages) if i >= first and message.get("role") == "assistant"]
    if not spoken:
        raise ValueError("no turn is the assistant's; wanted at least one turn to learn from")
    found = [_turn(template, render, messages, i, whole) for i in spoken]
    spans = [span for span in found if span is not None and span[0] < span[1]]
    if not spans:
        raise ValueError("the template rewrites every assistant turn; wanted one with {% generation %} tags")
    return [(a, b) for a, b, _ in spans], len(found) - len(spans), all(ended for _, _, ended in spans)


def _turn(template: Template, render: Render, messages: list[Message], i: int, whole: str):
    """Return start and end of assistant turn ``i`` and whether a special token ends it; None if the whole differs."""
    try:
        before = render(messages[:i], True)
        after = whole if i == len(messages) - 1 else render(messages[: i + 1], False)
        start = len(before)
        if not whole.startswith(before):  # DeepSeek's prompt opens a thought, which a chat may lack
            start = _last_special(template, whole, 0, len(os.path.commonprefix([before, whole])))
            if start < len(os.path.commonprefix([render(messages[:i], False), before])):
                return None
    except jinja2.TemplateError:  # of templates that want a user's turn first
        return None
    end = len(after)
    if not whole.startswith(after):  # Phi-3 writes an end of text behind the last turn, gpt-oss another end token
        said = _without_end(template, after)
        follows = template.follows.match(whole, len(said))
        if len(said) < start or not whole.startswith(said) or follows is None:
            return None
        end = follows.end()
    text, cut, gap = whole[start:end].rstrip(), None, True
    while token := next((token for token in template.specials if text.endswith(token)), None):
        cut = len(text) if gap else cut
        bare = text[: -len(token)].rstrip()
        text, gap = bare, len(bare) + len(token) < len(text)
    return (start, end, False) if cut is None else (start, start + cut, True)


def _last_special(template: Template, whole: str, start: int, end: int) -> int:
    return max((match.end() for match in template.special.finditer(whole, start, end)), default=-1)


def _without_end(template: Template, text: str) -> str:
    text = text.rstrip()
    while token := next((token for token in template.specials if text.endswith(token)), None):
        text = text[: -len(token)].rstrip()
    return text
