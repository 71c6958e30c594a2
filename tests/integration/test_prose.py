"""Prose rules of sources: docstrings open with a verb, sentences are short, and some words are never used.

Run ``python -m tests.integration.test_prose fquant/vq`` to list the faults below a folder.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("fquant", "shard", "models", "examples")
WORDS = 25  # in a sentence, at most
OPENS = re.compile(r"(What|Who|Whoever|Whether|Where|How|Which|When)\b")
BANNED = re.compile(r"\b(told|nobody|whoever|lies|as was said|is said|are said|whatever|somebody)\b", re.IGNORECASE)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def sentences(docstring: str) -> list[str]:
    """The sentences of a docstring's paragraphs; indented lines, tables and code are left out."""
    prose = [line for line in docstring.splitlines() if not line.startswith("    ")]
    found: list[str] = []
    for paragraph in "\n".join(prose).split("\n\n"):
        text = re.sub(r"``[^`]*``|`[^`]*`|:\w+:`[^`]*`|\[[^\]]*\]", "x", " ".join(paragraph.split()))
        text = re.sub(r"\b(e\.g|i\.e|et al|cf|vs|etc|Fig|Sec|Eq|No)\.", r"\1", text)
        for item in re.split(r"(?:^|\s)[*-]\s", text):  # each item of a list is a paragraph
            found += re.split(r"(?<=[.!?:;])\s+", item)
    return found


def faults(path: str, source: str) -> list[str]:
    """One line for each fault of the file at ``path``."""
    found = []
    for at in ast.walk(ast.parse(source)):
        text = ast.get_docstring(at) if isinstance(at, DEFINITIONS) else None
        if not text:
            continue
        where = f"{path}:{getattr(at, 'lineno', 1)}"
        if OPENS.match(text):
            found.append(f"{where}: opens with {text.split()[0]}; begin with an imperative verb")
        for sentence in sentences(text):
            if len(sentence.split()) > WORDS:
                found.append(f"{where}: {len(sentence.split())} words, wanted at most {WORDS}: {sentence[:60]}...")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            if word := BANNED.search(token.string):
                line = token.start[0] + token.string[: word.start()].count("\n")
                found.append(f"{path}:{line}: the word {word[0]!r}; say it in the field's terms")
    return found


FILES = sorted(p.relative_to(ROOT).as_posix() for folder in SOURCES for p in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_file(path):
    assert faults(path, (ROOT / path).read_text("utf-8")) == []


WRONG = {
    "opens": ('"""What it does."""', "opens with What"),
    "of a function": ('"""A module."""\ndef f():\n    """Whether it is."""', "a.py:2: opens with Whether"),
    "long": ('"""Do ' + "this and that " * 9 + '."""', "29 words"),
    "a comment": ('"""A module."""\n# as it is told', "a.py:2: the word 'told'"),
    "an error": ('"""A module."""\nraise ValueError("nobody knows")', "the word 'nobody'"),
}


@pytest.mark.parametrize(("source", "fault"), WRONG.values(), ids=WRONG)
def test_faults_are_found(source, fault):
    (found,) = faults("a.py", source)
    assert fault in found


def test_code_and_lists_are_no_sentences():
    text = '"""Do it.\n\n    ' + "word " * 40 + "\n\n* " + "an item " * 10 + "\n* " + "an item " * 10 + '\n"""'
    assert faults("a.py", text) == []


if __name__ == "__main__":
    for name in sys.argv[1:] or SOURCES:
        for file in sorted(Path(name).rglob("*.py")) if Path(name).is_dir() else [Path(name)]:
            print(
                *faults(file.as_posix(), file.read_text("utf-8")),
                sep="\n",
                end="\n" if faults(file.as_posix(), file.read_text("utf-8")) else "",
            )
