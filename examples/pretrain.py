"""Pretrain the small Llama that is shipped in ``examples/model``.

    python -m examples.pretrain --out DIR --minutes 30

The corpus is the documentation of the Python standard library: the docstring of every module, class and function under
its name and signature, and the language reference of ``help()``. A byte-level BPE tokenizer is trained first, then the
model, in float32 on packed documents. The weights are saved in bfloat16.
"""

import ast
import itertools
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from torch import Tensor

from fquant import jit, optim, random, tree
from fquant.device import HOST, parse
from fquant.io import safetensors
from models import blocks, decoder, hf
from models.config import Config

from .common import finite, terminal
from .common.command_line import check_least, check_used, command_line
from .common.devices import DeviceName, to
from .common.model_folders import output
from .common.progress import bar

END = "<|endoftext|>"  # token 0: before every document, and so after every document
SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
CONFIG = Config(
    vocab=4096, dim=256, num_layers=5, num_heads=8, num_kv_heads=4, head_dim=32, hidden=704, tied=True,
    max_positions=1024,
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Train a small Llama on the Python standard library's documentation."""

    out: Path = Path()
    """folder to write, in Hugging Face layout"""
    minutes: float = 30.0
    """time to train; sets the number of steps by the pace of the first few"""
    steps: int | None = None
    """number of steps, instead of minutes"""
    seq: int = 256
    """tokens in a sequence"""
    batch: int = 4
    """sequences in a step"""
    lr: float = 2e-3
    """peak learning rate"""
    warmup: int = 100
    """steps of linear warm-up"""
    weight_decay: float = 0.1
    """decoupled, on every parameter"""
    held_out: int = 40
    """one document in this many is held out"""
    seed: int = 0
    """of the initial weights and the order of documents"""
    device: DeviceName = "auto"
    threads: int = 1
    """CPU threads"""
    every: int = 200
    """steps between two lines of the log"""

    def check(self) -> None:
        """Raise ValueError for values out of range, and for options that do nothing."""
        least = dict.fromkeys(("steps", "seq", "batch", "threads", "every"), 1)
        check_least(self, least | {"warmup": 0, "weight_decay": 0, "held_out": 2})
        for name in ("minutes", "lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted a number above 0")
        check_used(self, {"minutes": (lambda x: x.steps is not None, "is in place of --steps; leave one out")})
        if self.out == Path():
            raise ValueError("there is no --out; wanted --out DIR, a folder to write")


def documents() -> list[str]:
    """Return every distinct docstring of the standard library in the order of its files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [f"{name}\n\n{text.strip()}" for name, text in sorted(topics.items())]
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED & set(parts):
            parsed = ast.parse(path.read_bytes())
            found += _documented(parsed, ".".join(p for p in parts if p != "__init__"))
    return list(dict.fromkeys(found))


def _documented(scope: Any, name: str) -> Iterator[str]:
    if text := ast.get_docstring(scope):
        signature = f"({ast.unparse(scope.args)})" if hasattr(scope, "args") else ""
        yield f"{name}{signature}\n\n{text}"
    for inner in scope.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(inner, f"{name}.{inner.name}")


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of ``vocab`` tokens, of which ``END`` is token 0; it can encode any text."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: Any = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, **options))
    return tokenizer


def pack(encoded: list[list[int]], seq: int) -> tuple[Tensor, Tensor]:
    """Cut the stream of documents into tokens and segments, i64[n seq+1] on the host; neighbours share one token."""
    stream = torch.tensor([token for document in encoded for token in (0, *document)], device=HOST)
    tokens = stream.unfold(0, seq + 1, seq)
    return tokens, (tokens == 0).cumsum(-1)


def batches(encoded: list[list[int]], options: Options) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end, on the device; epoch e is packed in the order of key (seed, e)."""
    device = parse(options.device)
    key = random.fold(random.key(options.seed), "documents")
    for epoch in itertools.count():
        order = random.permutation(random.fold(key, epoch), len(encoded)).tolist()
        tokens, segments = pack([encoded[i] for i in order], options.seq)
        for i in range(0, len(tokens) - options.batch + 1, options.batch):
            yield to((tokens[i : i + options.batch], segments[i : i + options.batch]), device)


def loss(params: Any, tokens: Tensor, segments: Tensor) -> Tensor:
    """Return the mean negative log likelihood, in nats a token."""
    logits = decoder.forward(params, tokens[..., :-1], CONFIG, segments=segments[..., :-1])
    return blocks.cross_entropy(logits, tokens[..., 1:])


def evaluate(params: Any, tokens: Tensor, segments: Tensor) -> float:
    """Return the loss over all sequences, a few at a time."""
    with torch.no_grad():
        parts = [loss(params, t, s) * len(t) for t, s in zip(tokens.split(8), segments.split(8), strict=True)]
    found = float(sum(parts)) / len(tokens)
    finite.check(found, "held out")
    return found


def sample(params: Any, tokenizer: Tokenizer, prompt: str, length: int, key: Tensor) -> str:
    """Continue ``prompt`` by up to ``length`` tokens at temperature 0.8."""
    tokens = torch.tensor([0, *tokenizer.encode(prompt).ids], device=params.embed.device)
    key = to(key, params.embed.device)
    for i in range(length):
        with torch.no_grad():
            logits = decoder.forward(params, tokens, CONFIG)[-1] / 0.8
        noise = -torch.log(-torch.log(random.uniform(random.fold(key, i), logits.shape).clamp(min=1e-9)))
        token = (logits + noise).argmax()  # the Gumbel trick
        if token == 0:
            break
        tokens = torch.cat([tokens, token[None]])
    return tokenizer.decode(tokens[1:].tolist())


def main(options: Options) -> None:
    """Train and save the model and its tokenizer; raise ValueError for a folder in use or impossible options."""
    options.check()
    with output(options.out, resume=True):
        train(options)


def train(options: Options) -> None:
    """Train and save the model and its tokenizer, as :func:`main` in a folder that no other process writes."""
    device = parse(options.device)
    if options.out.exists() and any(options.out.iterdir()):
        raise ValueError(f"--out {options.out}: not empty, want a new folder; choose another")
    torch.set_num_threads(options.threads)
    console = terminal.console()
    texts = documents()
    kept = [text for i, text in enumerate(texts) if i % options.held_out]
    tokenizer = train_tokenizer(kept, CONFIG.vocab)
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(kept)]
    test = pack([encoding.ids for encoding in tokenizer.encode_batch(texts[:: options.held_out])], options.seq)
    test = to(test, device)
    console.print(f"{len(kept)} documents, {sum(map(len, encoded))} tokens; {test[0].numel()} held out", soft_wrap=True)

    params = to(decoder.init(CONFIG, random.key(options.seed)), device)
    source = batches(encoded, options)
    # Captured, because eager torch.func.grad keeps every intermediate for a second derivative.
    step = jit(torch.func.grad_and_value(loss))
    if (steps := options.steps) is None:
        trials, start = 10, time.monotonic()
        for _ in range(trials):
            step(params, *next(source))
        steps = max(1, int(options.minutes * 60 * trials / (time.monotonic() - start)))
    adamw = optim.adamw(optim.cosine(options.lr, steps, options.warmup), b2=0.98, weight_decay=options.weight_decay)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), adamw)
    state = optimizer.init(params)
    start = time.monotonic()
    with bar(console) as progress:
        task = progress.add_task("training", total=steps)
        for i in range(1, steps + 1):
            grads, value = step(params, *next(source))
            finite.check(float(value), f"step {i}")
            updates, state = optimizer.update(grads, state, params)
            params = optim.apply_updates(params, updates)
            progress.update(task, advance=1, description=f"loss {value:.3f}")
            if i % options.every == 0 or i == steps:
                pace = i * options.batch * options.seq / (time.monotonic() - start)
                line = f"step {i}  loss {value:.4f}  held out {evaluate(params, *test):.4f}  {pace:.0f} tokens/s"
                progress.console.print(line, soft_wrap=True)

    params = tree.map(lambda t: t.to(torch.bfloat16), params)
    write_tokenizer(options.out, tokenizer)
    hf.save(options.out, CONFIG, params, extra={"bos_token_id": 0, "eos_token_id": 0})
    _, params = hf.load(options.out, device=device)
    console.print(f"saved to {options.out}, held out in bfloat16: {evaluate(params, *test):.4f}", soft_wrap=True)
    for prompt in ("json.dumps(", "Return the "):
        console.print(sample(params, tokenizer, prompt, 120, random.key(1)), highlight=False)


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which transformers needs, each atomically."""
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    about["model_max_length"] = CONFIG.max_positions
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("tokenizer.json", tokenizer.to_str()), ("tokenizer_config.json", json.dumps(about, indent=2))):
        with safetensors.replacing(folder / name) as file:
            file.write(text.encode())


if __name__ == "__main__":
    try:
        main(command_line(Options(), None, "python -m examples.pretrain"))
    except ValueError as error:
        terminal.complain("pretrain", error)
        sys.exit(2)
