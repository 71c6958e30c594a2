"""Questions with several answers, of which a model chooses the likeliest.

    {"question": "The capital of France is", "choices": ["Rome", "Paris"], "answer": 1}        a line each

The score of a choice is the log-probability of its tokens after the question and a space. Two accuracies are usual, as
in lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness): of the highest score, and of the highest score
over the bytes of the choice. The tokens of a choice are those of question and choice together, behind as many as the
question alone has.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from fquant.device import HOST
from fquant.tree import at, expect

from ..data.dataset import IGNORED, Rows
from ..data.workers import Worker

KEYS = {"question", "choices", "answer"}


class Question(NamedTuple):
    """A question, its choices, and the number of the right one."""

    question: str
    choices: list[str]
    answer: int


class Task(NamedTuple):
    """Rows of tokens, a choice each, and the number of choices, right answer and bytes of each choice."""

    rows: Rows
    counts: list[int]  # choices of each question
    answers: list[int]
    sizes: Tensor  # f64[rows], bytes of each choice


def read(path: Path) -> list[Question]:
    """Return the questions of a file; other keys than those three are ignored if they are scalars, such as an id.

    Raises ValueError that names the line.
    """
    expect(path.is_file(), f"{path}: no such file; wanted a JSONL file of questions")
    found = []
    for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1):
        if line.strip():
            with at(f"{path}:{number}"):
                found.append(_question(line))
    expect(found, f"{path}: is empty; wanted questions")
    return found


def _question(line: str) -> Question:
    try:
        item: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}; wanted one question a line") from None
    expect(isinstance(item, dict) and item.keys() >= KEYS, f"wanted an object with {', '.join(sorted(KEYS))}")
    question, choices = item["question"], item["choices"]
    answer: Any = item["answer"]
    strange = [key for key, x in item.items() if key not in KEYS and isinstance(x, dict | list)]
    expect(
        not strange, f"got {', '.join(strange):.80} beside the question, wanted no such lists or objects; remove them"
    )
    expect(isinstance(question, str) and question.strip(), f"question: got {question!r:.80}, wanted text")
    fits = isinstance(choices, list) and len(choices) > 1 and all(isinstance(x, str) and x.strip() for x in choices)
    expect(fits, f"choices: got {choices!r:.80}, wanted two texts or more")
    if isinstance(answer, str) and len(answer) == 1 and answer.isalpha():
        answer = ord(answer.upper()) - ord("A")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"answer: got {item['answer']!r:.80}, wanted 0 to {len(choices) - 1}, or a letter from A on")
    return Question(question, choices, answer)


def task(questions: Sequence[Question], tokenizer: Tokenizer | Worker, begin: Sequence[int], longest: int) -> Task:
    """Return the rows of all choices, padded to one length; ``begin`` are the tokens that begin a text.

    Raises ValueError for a choice that makes more than ``longest`` tokens.
    """
    rows: list[tuple[list[int], int]] = []
    sizes: list[int] = []
    for i, one in enumerate(questions):
        context = one.question.rstrip()
        for choice in one.choices:
            ids = tokenizer.encode(f"{context} {choice.strip()}", add_special_tokens=False).ids
            known = len(tokenizer.encode(context, add_special_tokens=False).ids)
            known = min(max(known, 1 - len(begin)), len(ids) - 1)  # a token to predict from, and one to predict
            fault = f"question {i + 1}: {len(begin) + len(ids)} tokens with a choice, wanted at most {longest}"
            expect(len(begin) + len(ids) <= longest + 1, f"{fault}; use --seq, or leave it out")
            rows.append(([*begin, *ids], len(begin) + known))
            sizes.append(len(choice.strip().encode()))
    length = max(len(ids) for ids, _ in rows) - 1
    tokens = torch.zeros(len(rows), length, dtype=torch.int64, device=HOST)
    targets = torch.full_like(tokens, IGNORED)
    for i, (ids, known) in enumerate(rows):
        tokens[i, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[i, known - 1 : len(ids) - 1] = torch.tensor(ids[known:])
    counts, answers = [len(one.choices) for one in questions], [one.answer for one in questions]
    return Task(Rows(tokens, targets), counts, answers, torch.tensor(sizes, dtype=torch.float64, device=HOST))


def accuracies(task: Task, scores: Tensor) -> tuple[float, float]:
    """Return the shares of right answers by ``scores`` f64[rows] of choices, and by scores over bytes."""
    right = torch.zeros(2, dtype=torch.int64, device=HOST)
    for answer, own, size in zip(task.answers, scores.split(task.counts), task.sizes.split(task.counts), strict=True):
        right += torch.stack([own.argmax(), (own / size).argmax()]) == answer
    whole, by_bytes = (right / len(task.answers)).tolist()
    return whole, by_bytes
