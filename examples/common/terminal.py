"""The terminal: what a stranger's file says is printed as text, and neither obeyed nor hidden.

    terminal.console().print(name, style="dim")     # a name may have escapes, brackets of rich's markup, or a :smile:
    terminal.complain("merge", error)               # a line on standard error

Names of tensors, keys of configurations and messages of templates are in what all programs print. So the programs print
through this file: it writes control characters as escapes, and reads no markup.
"""

import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from fquant.tree import LONGEST_MESSAGE, printable

KEPT = "\n\t"  # characters of a text of several lines


class _Plain(Console):
    """A console without markup and emoji codes."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield what is printed, in printable characters: a Text has not come through ``render_str``."""
        for x in super().render(renderable, options):
            yield x if x.control or x.text.isprintable() else Segment(printable(x.text, KEPT), x.style)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return ``text`` in printable characters; rich measures each text, cells of tables too, by this."""
        options |= {"markup": False, "emoji": False}
        return super().render_str(printable(text, KEPT), **options)


def console(**options: Any) -> Console:
    """Return a console that prints texts as they are; a style is an option of its ``print``."""
    return _Plain(markup=False, emoji=False, **options)


def complain(program: str, error: object) -> None:
    """Print the message of ``program`` about ``error`` as one line on standard error."""
    print(f"{program}: {printable(str(error), most=LONGEST_MESSAGE)}", file=sys.stderr)


def write(text: str) -> None:
    """Write the text that a model has made to standard output, to a terminal in printable characters."""
    sys.stdout.write(printable(text, KEPT) if sys.stdout.isatty() else text)


def guard() -> None:
    """Print tracebacks of this process in printable characters."""
    sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for part in traceback.format_exception(kind, error, trace):
        sys.stderr.write(printable(part, KEPT))
