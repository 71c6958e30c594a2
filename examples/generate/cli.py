"""Answer prompts with a decoder: text as it comes, and tokens/s.

    python -m examples.generate --model DIR --prompt "Once upon a time" --max-new-tokens 200
    python -m examples.generate --model DIR --chat chat.jsonl --temperature 0.7 --top-p 0.9 --seed 1
    python -m examples.generate --model DIR --adapter A B --prompt "..."      # each adapter answers, in one batch
    python -m examples.generate --model DIR --prompt "..." "..." --format none --json

Weights are packed while they are read (``--format nf4_dq``), or stay as they are (``--format none``). All prompts are
one batch. One answer is printed as it comes; several are printed when they are complete. The decode is captured at its
second token, which takes a second or two; tokens/s are of the tokens after it.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import tyro
from rich.console import Console

from fquant import lora, random, tree
from fquant.device import parse
from fquant.io import peft
from fquant.kernels.cpu.threads import usable_cores
from fquant.lazy import Lazy
from models import generate, hf

from ..common import terminal
from ..common.command_line import DTYPES, FormatName, check_least, check_used, command_line, parse_format, quantised
from ..common.devices import DeviceName, to
from ..common.progress import bar
from ..data import tokenizer as data_tokenizer
from ..data.workers import Worker, short
from . import prompts


@dataclass(frozen=True)
class Options:
    """Answer prompts with a decoder, whose weights are packed, and with adapters."""

    model: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path()
    """Folder with config.json, safetensors and tokenizer.json."""
    adapter: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="DIR")] = ()
    """PEFT adapters; each of several answers every prompt."""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT")] = ()
    """Texts to continue."""
    chat: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON with a list of messages, or JSON lines of {"messages": [...]}, to answer by the tokenizer's template."""
    chat_template: str | None = None
    """Jinja template in place of the tokenizer's: a file, chatml or zephyr."""
    max_new_tokens: int = 128
    """Tokens of an answer, at most."""
    temperature: float | None = None
    """Of the probabilities that tokens are drawn from; 0: the likeliest token. By default as generation_config.json."""
    top_k: int | None = None
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: float | None = None
    """Draw from the fewest tokens whose probabilities sum to p."""
    min_p: float | None = None
    """Draw from tokens of at least p times the largest probability."""
    repetition_penalty: float | None = None
    """Make tokens that the text has less likely, by a factor such as 1.1; default: the folder's."""
    seed: int = 0
    """The same seed gives the same text."""
    format: FormatName = "nf4_dq"
    """Format of the weights; none: as they are in the folder."""
    block: int | None = None
    """Elements that share a scale, instead of the format's own number."""
    dtype: str = "bf16"
    """Of the computation: bf16, f16 or f32."""
    device: DeviceName = "auto"
    json: bool = False
    """Print one JSON object an answer, with text, tokens, prompt (its number) and adapter."""

    def check(self) -> None:
        """Raise ValueError for options that do not fit together."""
        if self.model == Path():
            raise ValueError("there is no --model; wanted --model DIR, the folder of a decoder")
        check_used(
            self, {"chat_template": (lambda x: x.chat is None, "is of chats; give --chat FILE, or leave it out")}
        )
        check_least(self, {"max_new_tokens": 1})
        if bool(self.prompt) == (self.chat is not None):
            raise ValueError("wanted one of --prompt TEXT and --chat FILE")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"--top-k is {self.top_k}; wanted at least 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype is {self.dtype}; wanted one of {', '.join(DTYPES)}")


class Answer(NamedTuple):
    """One answer: its tokens without the one that stopped it, and its text."""

    prompt: int
    adapter: str | None
    text: str
    tokens: list[int]


@dataclass
class Timing:
    """Seconds of the first token of all rows, and of each later one, the first of which captures the step."""

    prompt_tokens: int
    rows: int
    started: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)

    def line(self) -> str:
        """Return the speeds as one line."""
        first = self.times[0] - self.started
        out = f"prefill {self.prompt_tokens / first:,.1f} tokens/s ({self.prompt_tokens} tokens)"
        steps = self.times[2:]
        if not steps:
            return out + "; decode: too few tokens to measure"
        speed = len(steps) * self.rows / (steps[-1] - self.times[1])
        return out + f"; decode {speed:,.1f} tokens/s ({self.rows} rows, {len(steps)} steps)"


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args`` and return its exit status: 0, or 2 for bad input, which one line names."""
    console = terminal.console(stderr=True)
    try:
        options = command_line(Options(), args, "python -m examples.generate")
        options.check()
        torch.set_num_threads(usable_cores())
        run(options, console, terminal.write)
    except (ValueError, TypeError, OSError) as error:
        terminal.complain("generate", error)
        return 2
    return 0


def run(options: Options, console: Console, write: Callable[[str], Any]) -> list[Answer]:
    """Read the model, answer every prompt with every adapter, and ``write`` the answers; return them."""
    with ExitStack() as stack:
        return _run(options, console, write, stack)


def _run(options: Options, console: Console, write: Callable[[str], Any], stack: ExitStack) -> list[Answer]:
    device = parse(options.device)
    settings = prompts.settings(options.model)
    how = prompts.sampling(settings, asdict(options))
    if options.seed and not how.temperature:
        raise ValueError(f"--seed is {options.seed}, and the likeliest tokens are taken; give a --temperature above 0")
    stop = prompts.stop_tokens(settings)
    if left := prompts.unapplied(settings):
        console.print(f"not applied of generation_config.json: {', '.join(left)}", style="yellow", highlight=False)
    cfg, found = hf.lazy(options.model, device)
    text = data_tokenizer.text(options.model, options.chat_template)
    tokenizer = stack.enter_context(Worker(text, limits=short(text.path)))
    texts = encoded(options, text, tokenizer)
    generate.check_request(texts, cfg, options.max_new_tokens)
    names = partial(hf.path_of, cfg=cfg), hf.tied_modules(cfg)
    adapters = [to(peft.load(at, *names), device) for at in options.adapter]
    for at, adapter in zip(options.adapter, adapters, strict=True):
        with tree.at(str(at)):
            lora.attach(found, adapter)  # a fault before the weights are read
    params = read(quantised(found, parse_format(options.format, options.block)), console)
    if len(adapters) == 1:
        params = lora.attach(params, adapters[0])
    names = [str(at) for at in options.adapter] or [None]
    requests = [(i, j) for i in range(len(texts)) for j in range(len(names))]
    own = None
    if len(adapters) > 1:
        which = torch.tensor([j for _, j in requests], dtype=torch.int64, device=device)
        own = generate.rows(lora.stack(generate.aligned(adapters)), which)
    batch = [texts[i] for i, _ in requests]
    timing = Timing(sum(map(len, batch)), len(batch))
    show = _stream(tokenizer, write, stop) if len(batch) == 1 and not options.json else None
    rows_of: list[list[int]] = [[] for _ in batch]
    with torch.no_grad():
        for tokens in generate.stream(
            params, batch, cfg, max_new_tokens=options.max_new_tokens, stop=stop, how=how,
            key=random.key(options.seed) if how.temperature else None, adapters=own, dtype=DTYPES[options.dtype],
        ):  # fmt: skip
            timing.times.append(time.perf_counter())
            for row, token in zip(rows_of, tokens, strict=True):
                if token is not None and token not in stop:
                    row.append(token)
            if show is not None:
                show(tokens[0])
    if show is not None:
        show(None)
        write("\n")
    answers = [Answer(i, names[j], tokenizer.decode(row), row) for (i, j), row in zip(requests, rows_of, strict=True)]
    if options.json:
        write("".join(json.dumps(answer._asdict(), ensure_ascii=False) + "\n" for answer in answers))
    elif show is None:
        write("".join(_block(answer, options) for answer in answers))
    console.print(timing.line(), style="dim", highlight=False, soft_wrap=True)
    return answers


def encoded(options: Options, text: data_tokenizer.Text, tokenizer: Worker) -> list[list[int]]:
    """Return the tokens of each prompt; raise ValueError for one without tokens, and for no prompts."""
    if options.chat is not None:
        found = prompts.encode_chats(prompts.chats(options.chat), text)
    else:
        found = [prompts.encode(prompt, tokenizer) for prompt in options.prompt]
    if not found:
        raise ValueError("prompts: got none; wanted text")
    for i, tokens in enumerate(found):
        if not tokens:
            raise ValueError(f"prompt {i} has no tokens; wanted text")
    return found


def read(lazy: Any, console: Console) -> Any:
    """Read the tree ``lazy``, with a bar on a terminal."""
    with bar(console, console.is_terminal) as progress:
        leaves = [leaf for leaf in tree.leaves(lazy) if isinstance(leaf, Lazy)]
        task = progress.add_task("reading the model", total=len(leaves))

        def leaf(_: str, x: Any) -> Any:
            out = x.read() if isinstance(x, Lazy) else x
            progress.advance(task)
            return out

        return tree.map_with_path(leaf, lazy)


def _stream(tokenizer: Worker, write: Callable[[str], Any], stop: Sequence[int]) -> Callable[[int | None], None]:
    """Return a function that writes the text that each token completes, and with None the rest."""
    text = prompts.pieces(tokenizer)
    next(text)

    def show(token: int | None) -> None:
        if token is None or token not in stop:
            write(text.send(token))
            sys.stdout.flush()

    return show


def _block(answer: Answer, options: Options) -> str:
    name = f"prompt {answer.prompt}" + (f", {answer.adapter}" if answer.adapter and len(options.adapter) > 1 else "")
    return f"--- {name}\n{answer.text}\n"
