"""Compile chat templates in the sandbox of transformers.

The environment is that of transformers (utils/chat_template_utils.py): sandboxed, immutable, with the tag
``{% generation %}``, ``raise_exception``, ``strftime_now``, and a ``tojson`` that escapes no HTML. The sandbox stops
attributes, not loops or huge texts: those end with the process that ``serve.py`` is.

Special tokens typed in a message are wrapped in private characters before rendering. So they differ from those of the
template, and stay text. This is transformers' ``sanitize_control_tokens``.
"""

import contextlib
import json
import re
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

START, END = "\U000f0000", "\U000f0001"  # around a special token that was typed
NEEDLE = "fquant needle"

Span = tuple[int, int]


class Tracker(Extension):
    """The tag ``{% generation %}``: ``spans`` has the characters that its blocks write."""

    tags = {"generation"}

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.length = 0  # of the text so far
        self.spans: list[Span] = []
        self.is_used = False

    def parse(self, parser: Any) -> nodes.Node:
        """Parse the tag's body into a call of ``_record``."""
        line, self.is_used = next(parser.stream).lineno, True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Any) -> str:
        text = caller()
        self.spans.append((self.length, self.length + len(text)))
        return text


class Names(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # without ``self``, so that namespace(self=1) is allowed
        found = dict(*args[1:], **values)
        for name in found:
            _expect_plain(name)
        jinja2.utils.Namespace.__init__(args[0], found)

    def __setitem__(self, name: str, value: Any) -> None:
        _expect_plain(name)
        super().__setitem__(name, value)


class Dict:
    """The two ways to make a dict."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dict of keys that have one value."""
        return dict.fromkeys(*args)


class Template:
    """A compiled template, with the variables of every chat and the special tokens to mark.

    Raises jinja2.TemplateError if ``source`` is no template. ``characters`` bounds the text of a chat.
    """

    def __init__(self, name: str, source: str, variables: dict[str, Any], specials: list[str], characters: int) -> None:
        found, self.name = environment(), name
        self.compiled, self.tracker = found.from_string(source), found.extensions[Tracker.identifier]
        self.characters, self.has_tag = characters, self.tracker.is_used  # type: ignore[attr-defined]
        self.variables = {**self.compiled.globals, "tools": None, "documents": None, **variables}
        self.specials = tuple(sorted(specials, key=len, reverse=True))
        self.special = re.compile("|".join(map(re.escape, self.specials)) or "(?!)")
        self.follows = re.compile(rf"\s*(?:{self.special.pattern})")  # white space and a special token
        self.marked = re.compile(f"{START}({self.special.pattern}){END}|[{START}{END}]")
        self.takes_parts = self._takes_parts()

    def text(self, messages: list[dict[str, Any]], prompt: bool, **values: Any) -> str:
        """Return the text of ``messages``, with the beginning of an answer if ``prompt``.

        Raises jinja2.TemplateError that names the template, for any error of its code.
        """
        given = self.variables | values | {"messages": messages, "add_generation_prompt": prompt}
        context = self.compiled.new_context(given, shared=True)  # globals are there: a chat costs half as much
        tracker: Any = self.tracker
        parts, tracker.length, tracker.spans = [], 0, []
        try:
            for part in self.compiled.root_render_func(context):
                parts.append(part)
                tracker.length += len(part)
                if tracker.length > self.characters:
                    raise ValueError(f"the text has more than {self.characters} characters")
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a stranger's program may raise anything
            said = str(error) or type(error).__name__
            if isinstance(error, jinja2.UndefinedError | TypeError) and _has_text_arguments(messages):
                said += "; the arguments of a tool call are a text in this chat, wanted an object"
            raise jinja2.TemplateError(f"the chat template {self.name!r}: {said}") from error
        return "".join(parts)

    def is_special_in(self, x: Any) -> bool:
        """Return True if a text of the JSON value ``x`` has a special token."""
        if isinstance(x, str):
            return self.special.search(x) is not None
        if isinstance(x, dict):
            return any(map(self.is_special_in, x.values()))
        return isinstance(x, list) and any(map(self.is_special_in, x))

    def mark(self, x: Any) -> Any:
        """Return the JSON value ``x``, the special tokens in its texts wrapped in private characters."""
        if isinstance(x, str):
            return self.special.sub(f"{START}\\g<0>{END}", x.replace(START, "").replace(END, ""))
        if isinstance(x, dict):
            return {key: self.mark(value) for key, value in x.items()}
        return [self.mark(value) for value in x] if isinstance(x, list) else x

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Cut ``text`` at the marks, which are removed; True marks pieces that were typed."""
        parts = self.marked.split(text)
        return [(part, i % 2 == 1) for i, part in enumerate(parts) if part]

    def _takes_parts(self) -> bool:
        """Return True if the template reads a list of parts as the content of a turn."""
        with contextlib.suppress(Exception):
            said = self.text([{"role": "user", "content": [{"type": "text", "text": NEEDLE}]}], False)
            return NEEDLE in said and "'type'" not in said and '"type"' not in said
        return False


def environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox that transformers renders chat templates in."""
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Tracker, loopcontrols])
    found.filters["tojson"] = _to_json
    found.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    found.globals |= {"dict": Dict(), "namespace": Names}
    return found


def _expect_plain(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _has_text_arguments(messages: list[dict[str, Any]]) -> bool:
    """Return True if a tool call has its arguments as JSON in a text, as OpenAI writes them."""
    lists = [calls for message in messages if isinstance(calls := message.get("tool_calls"), list)]
    functions = [call.get("function") for calls in lists for call in calls if isinstance(call, dict)]
    return any(isinstance(x, dict) and isinstance(x.get("arguments"), str) for x in functions)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(x: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
