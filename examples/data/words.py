"""Encode text by byte-level BPE, a word at a time, with a memory of words.

tokenizers encodes 1 to 3 MB/s on a core. A byte-level BPE first cuts text into words by a regular expression. No
merge crosses a word, so a word's tokens are always the same. This module cuts with Python's ``re``, takes known words
from a dict, and asks tokenizers for new ones only. ``tests/bench/data`` measures both.

The expression is translated: ``\\p{..}`` and ``\\s`` become explicit classes. Text with characters that this Python's
Unicode does not assign is left to tokenizers, whose tables may be newer. So is everything else that is not understood:
other models, normalizers and pre-tokenizers, and added tokens that strip spaces.
"""

import bisect
import itertools
import json
import re
import sys
import unicodedata
from array import array
from collections.abc import Iterable
from functools import cache

from tokenizers import Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel(use_regex=True)
ASCII, BASIC = 0x7F, 0xFFFF  # re is slow with characters beyond
SPACE = "\\x09-\\x0d\\x20"  # of ASCII; the rest of Unicode's White_Space, which is onig's \s, follows
SPACES = SPACE + "\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
TOKEN = re.compile(r"\\p\{\^?\w+\}|\\.|\[\^?|\]|[^\\\[\]]", re.DOTALL)
PLAIN = set("rnt/") | set(".-+*?()[]{}|^$'\"\\ ")  # escapes that mean the same in both dialects
KNOWN = 1 << 20  # words; beyond, all are forgotten


class Words(dict[str, bytes]):
    """The tokens of each word as i32; a new word is encoded when it is looked up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.model = tokenizer.model
        self.letters = {byte: letter for byte, letter in enumerate(_byte_letters())}

    def __missing__(self, word: str) -> bytes:
        if len(self) >= KNOWN:
            self.clear()
        mapped = word.encode().decode("latin-1").translate(self.letters)
        self[word] = found = array("i", [token.id for token in self.model.tokenize(mapped)]).tobytes()
        return found


def expression(tokenizer: Tokenizer) -> str | None:
    """Return the expression that cuts text into words, or None if this is not a byte-level BPE that is understood."""
    spec = json.loads(tokenizer.to_str())
    model, normalizer, pre = spec["model"], spec["normalizer"], spec["pre_tokenizer"]
    odd = any(model.get(key) for key in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"))
    if model.get("type") != "BPE" or odd or (normalizer or {"type": "NFC"})["type"] != "NFC" or pre is None:
        return None
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    match [(step["type"], step.get("use_regex"), step.get("add_prefix_space")) for step in steps]:
        case [("ByteLevel", True, False)]:
            return GPT2
        case [("Split", _, _), ("ByteLevel", False, False)]:
            split = steps[0]
            if split["behavior"] == "Isolated" and not split["invert"] and "Regex" in split["pattern"]:
                return split["pattern"]["Regex"]
    return None


@cache
def translated(expression: str, highest: int = sys.maxunicode) -> re.Pattern[str] | None:
    """Return an expression of Oniguruma in Python's dialect, or None if it has anything that is not understood.

    Classes end at the code point ``highest``: for ASCII the result is five times as fast.
    """
    out, inside, space = [], False, SPACE if highest == ASCII else SPACES
    for token in TOKEN.findall(expression):
        if token.startswith(r"\p"):
            ranges = _category(token[3:-1], highest)
            out.append(ranges if inside else f"[{ranges}]")
            if not ranges and not (inside and highest == ASCII):
                return None
        elif token in (r"\s", r"\S"):
            if token == r"\S" and inside:
                return None
            out.append(space if inside else f"[{space}]" if token == r"\s" else f"[^{space}]")
        elif token[0] == "\\" and token[1] not in PLAIN:
            return None
        else:
            inside = token != "]" if token[0] in "[]" and token[0] != "\\" else inside
            out.append(token)
    if "(?<" in expression or "&&" in expression:
        return None
    try:
        return re.compile("".join(out) + r"|[\s\S]")
    except re.error:
        return None


@cache
def _category(name: str, highest: int = sys.maxunicode) -> str:
    """Return the ranges of the code points of a general category, such as L or Lu, for a class of ``re``."""
    if name not in ("L", "N", "M", "P", "S", "Cn") and not (len(name) == 2 and name[0] in "LNMPSZC"):
        return ""
    ranges, start = [], None
    for point in range(highest + 2):
        inside = point <= highest and unicodedata.category(chr(point)).startswith(name)
        if inside and start is None:
            start = point
        elif not inside and start is not None:
            ranges.append(f"\\U{start:08x}-\\U{point - 1:08x}")
            start = None
    return "".join(ranges)


@cache
def unassigned() -> re.Pattern[str]:
    """Return an expression for characters that this Python's Unicode does not know."""
    return re.compile(f"[{_category('Cn')}]")


def _byte_letters() -> Iterable[str]:
    """Return the letter of each byte in byte-level vocabularies, as in GPT-2's bytes_to_unicode."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


class Encoder:
    """A tokenizer's text encoder: all its added tokens are control tokens, or those that are not special.

    The second kind is for what a user typed, whose special tokens stay text.
    """

    def __init__(self, tokenizer: Tokenizer, typed: bool, words: Words, expression: str | None) -> None:
        self.tokenizer, self.words = Tokenizer.from_str(tokenizer.to_str()), words
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = typed
        added = [t for t in self.tokenizer.get_added_tokens_decoder().values() if not (typed and t.special)]
        if any(t.lstrip or t.rstrip or t.single_word or not unicodedata.is_normalized("NFC", t.content) for t in added):
            expression = None
        names = sorted((t.content for t in added), key=len, reverse=True)
        self.added = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self.ascii = translated(expression, ASCII) if expression else None
        self.expression = expression if self.ascii else None
        line = self.ids("\n")  # transformers encodes text within a document behind this, and cuts it off again
        self.line = (
            line if self.ids("\na")[: len(line)] == line and self.ids("\na")[len(line) :] != self.ids("a") else []
        )

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text as tokenizers encodes them."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, text: str, inside: bool = False) -> bytes:
        """Return the tokens of a text as i32; ``inside``: it continues a document, so no space goes before it."""
        parts = self.parts(text)
        if parts is not None:
            return b"".join(map(self.part, itertools.count(), parts))
        if inside and self.line:
            found = self.ids("\n" + text)
            if found[: len(self.line)] == self.line:
                return array("i", found[len(self.line) :]).tobytes()
        return array("i", self.ids(text)).tobytes()

    def parts(self, text: str) -> list[str] | None:
        """Cut text at its added tokens, which are every second part; None if the memory of words cannot encode it."""
        cut = self._pattern(text)
        if cut is None:
            return None
        if cut is not self.ascii:
            if unassigned().search("".join(set(text))):
                return None
            if self.tokenizer.normalizer is not None and not unicodedata.is_normalized("NFC", text):
                return None
        if self.added is None:
            return [text]
        return self.added.split(text)

    def part(self, number: int, text: str) -> bytes:
        """Return the tokens of part ``number`` of a text."""
        if number % 2:
            return array("i", [self.tokenizer.token_to_id(text) or 0]).tobytes()
        return b"".join(map(self.words.__getitem__, self._pattern(text).findall(text)))  # type: ignore[union-attr]

    def runs(self, text: str, edges: set[int]) -> list[tuple[str, bytes]]:
        """Return text without added tokens in runs of words, cut around each word that an edge is in or beside."""
        words = self._pattern(text).findall(text)  # type: ignore[union-attr]
        ends = [0, *itertools.accumulate(map(len, words))]
        cuts = {0, len(words)}
        for edge in edges:
            cuts |= {bisect.bisect_left(ends, edge), bisect.bisect_right(ends, edge) - 1}
        found = []
        for i, j in itertools.pairwise(sorted(cuts)):
            found.append((text[ends[i] : ends[j]], b"".join(map(self.words.__getitem__, words[i:j]))))
        return found

    def within(self, word: str, ids: bytes, start: int, end: int) -> tuple[int, int]:
        """Return the range of a word's tokens that have one of its characters from ``start`` to ``end``."""
        first, last = (len(word[: max(0, x)].encode()) for x in (start, end))
        names = map(self.tokenizer.id_to_token, array("i", ids))
        ends = list(itertools.accumulate(len(str(name)) for name in names))  # a letter is a byte
        return bisect.bisect_right(ends, first), bisect.bisect_left(ends, last) + 1

    def _pattern(self, text: str) -> re.Pattern[str] | None:
        if self.expression is None or text.isascii():
            return self.ascii
        return translated(self.expression, BASIC if max(text) <= chr(BASIC) else sys.maxunicode)
