"""Decode and prefill of a packed decoder, beside transformers with bitsandbytes and llama.cpp, on the same weights.

    python -m tests.bench.generate                          # 12 layers of 2048, 0.6 B parameters in bf16
    python -m tests.bench.generate --layers 2 --json g.json

The program writes random weights to a new folder under ``--folder``, and deletes it at the end. Contestants:

    fquant        NF4_DQ; prefill as it is, decode captured, with the choice of the token
    bnb           transformers' model with bitsandbytes' NF4 and double quantisation, called without ``generate``
    llama.cpp     Q4_K, whose head has 6 bits; left out if its package is not installed
    read          reading as many bytes as a decoded token needs: packed weights, and the head in bf16

Contestants take turns, and figures are medians: milliseconds a decoded token, and a prefill of the whole prompt. The
exit status is 0 for bounds met or missed, or 2 for bad options.
"""

import contextlib
import importlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro

from fquant import NF4_DQ, bind, lazy, quantize, random, tree
from models import decoder, generate, hf
from models.config import Config
from models.export import gguf
from models.export.gguf_tokenizer import SPLITTERS
from tests.bench import report, timing
from tests.bench.peers import quiet
from tests.bench.report import Row, at_most
from tests.helpers import tokenizers

LINEARS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
WANTED_DECODE, WANTED_PREFILL = 1 / 1.5, 1 / 1.2


@dataclass(frozen=True)
class Options:
    """Decode and prefill beside transformers with bitsandbytes and llama.cpp."""

    dim: int = 2048
    """Width of the residual stream; layers are as TinyLlama's: 11/4 of it wide, one key head for eight."""
    layers: int = 12
    """Layers."""
    vocab: int = 32000
    """Rows of the embedding and of the head, which stay dense."""
    prompt: int = 128
    """Tokens of the prompt."""
    tokens: int = 16
    """Tokens decoded in a turn."""
    repeats: int = 7
    """Turns of each contestant."""
    threads: int = torch.get_num_threads()
    """Threads of all contestants."""
    folder: Path = Path(tempfile.gettempdir())
    """Folder for the checkpoint."""
    json: Path | None = None
    """File for the figures."""

    def config(self) -> Config:
        """Return the shape of the model."""
        heads = self.dim // 64
        hidden, longest = self.dim * 11 // 4 // 256 * 256, self.prompt + self.tokens
        return Config(self.vocab, self.dim, self.layers, heads, max(1, heads // 8), 64, hidden, max_positions=longest)

    def text(self) -> list[int]:
        """Return the prompt."""
        return torch.randint(self.vocab, (self.prompt,), generator=torch.Generator().manual_seed(0)).tolist()


class Contestant(NamedTuple):
    """``prefill(tokens)`` starts a text and returns the logits f[vocab] behind it; ``decode(token)`` continues it."""

    prefill: Callable[[list[int]], torch.Tensor]
    decode: Callable[[int], int]


def fquant_side(folder: Path, options: Options) -> tuple[Contestant, int]:
    """Return our side, and the bytes that a decoded token reads."""
    cfg, found = hf.lazy(folder)
    params = lazy.read(tree.map_at(LINEARS, partial(quantize, format=NF4_DQ), found))
    advance = bind(generate.captured_step, params=params, key=None, cfg=cfg)
    held: dict[str, generate.Cache] = {}

    def prefill(tokens: list[int]) -> torch.Tensor:
        length = torch.tensor([len(tokens)])
        logits, held["cache"] = generate.prefill(params, torch.tensor([tokens]), length, cfg, longest=cfg.max_positions)
        return logits[0]

    def decode(token: int) -> int:
        after, held["cache"] = advance(token=torch.tensor([token]), cache=held["cache"])
        return int(after)

    return Contestant(prefill, decode), sum(t.nbytes for t in tree.leaves((params.layers, params.final)))


def bnb_side(folder: Path) -> Contestant:
    """Return transformers' model with bitsandbytes' layers."""
    import transformers

    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    load = transformers.AutoModelForCausalLM.from_pretrained
    model: Any = load(folder, dtype=torch.bfloat16, quantization_config=how, device_map="cpu").eval()
    held: dict[str, Any] = {}

    def call(tokens: list[int]) -> torch.Tensor:
        out = model(torch.tensor([tokens]), past_key_values=held["cache"], use_cache=True, logits_to_keep=1)
        held["cache"] = out.past_key_values
        return out.logits[0, -1]

    def prefill(tokens: list[int]) -> torch.Tensor:
        held["cache"] = None
        return call(tokens)

    return Contestant(prefill, lambda token: int(call([token]).argmax()))


def llama_side(folder: Path, options: Options) -> Contestant:
    """Return llama.cpp's model of a Q4_K file of the same weights."""
    llama_cpp = importlib.import_module("llama_cpp")  # need not be installed
    cfg, found = hf.lazy(folder)
    path = folder / "model.gguf"
    words = tokenizers.write(folder / "words", tokenizers.byte_level(next(iter(SPLITTERS))), bos_token="<|end|>")
    gguf.save(path, cfg, found, "q4_k", words)  # llama.cpp loads no file without a vocabulary
    threads: Any = {"n_threads": options.threads, "n_threads_batch": options.threads}
    model: Any = llama_cpp.Llama(str(path), n_ctx=cfg.max_positions, n_batch=512, verbose=False, **threads)

    def scores() -> Any:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (cfg.vocab,))

    def prefill(tokens: list[int]) -> torch.Tensor:
        model.reset()
        model.eval(tokens)
        return torch.from_numpy(scores().copy())

    def decode(token: int) -> int:
        model.eval([token])
        return int(scores().argmax())

    return Contestant(prefill, decode)


def dense_logits(folder: Path, options: Options) -> torch.Tensor:
    """Return the logits behind the prompt of the weights as they were written."""
    cfg, params = hf.load(folder)
    return decoder.forward(params, torch.tensor(options.text()), cfg)[-1].float()


def measure(sides: dict[str, Contestant], options: Options) -> tuple[dict[str, float], dict[str, float], Any]:
    """Return the milliseconds of a prefill and of a decoded token, and the first logits, of each contestant."""
    prompt = options.text()
    logits = {name: side.prefill(prompt).float() for name, side in sides.items()}
    fills: dict[str, list[float]] = {name: [] for name in sides}
    steps: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.repeats + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            token = int(side.prefill(prompt).argmax())
            filled = time.perf_counter() - start
            times = []
            for _ in range(options.tokens):
                start = time.perf_counter()
                token = side.decode(token)
                times.append(time.perf_counter() - start)
            if turn:  # the first captures, and touches memory
                fills[name].append(filled)
                steps[name].append(median(times[1:]))
    ms = lambda samples: {name: median(found) * 1e3 for name, found in samples.items()}
    return ms(fills), ms(steps), logits


def rows(fills: dict[str, float], steps: dict[str, float]) -> list[Row]:
    """Return the rows of the table, judged."""
    decoded = [at_most("of bnb", steps["fquant"] / steps["bnb"], WANTED_DECODE)]
    filled = [at_most("of bnb", fills["fquant"] / fills["bnb"], WANTED_PREFILL)]
    return [Row("decode, a token", "ms", steps, decoded), Row("prefill", "ms", fills, filled)]


@contextlib.contextmanager
def checkpoint(options: Options) -> Iterator[Path]:
    """Yield a folder with random weights, deleted at the end."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        cfg = options.config()
        hf.save(Path(name), cfg, decoder.init(cfg, random.key(0), torch.bfloat16))
        yield Path(name)


def main(args: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    options = tyro.cli(Options, args=args, prog="python -m tests.bench.generate")
    try:
        timing.check_threads(options.threads)
        report.check_writable(options.json)
    except ValueError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    with checkpoint(options) as folder, timing.threads(options.threads), timing.others() as others, quiet():
        with torch.no_grad():
            ours, nbytes = fquant_side(folder, options)
            sides = {"fquant": ours, "bnb": bnb_side(folder)}
            if importlib.util.find_spec("llama_cpp"):
                sides["llama.cpp"] = llama_side(folder, options)
            fills, steps, logits = measure(sides, options)
            exact = dense_logits(folder, options)
            best, _, speed = timing.fastest_read(nbytes // options.layers, options.layers, options.repeats)
    steps["read"] = nbytes / speed[best] / 1e6
    likeness = {name: float(torch.cosine_similarity(x, exact, 0)) for name, x in logits.items()}
    found = rows(fills, steps)
    size = f"{options.layers} layers of {options.dim}, {options.vocab} tokens, a prompt of {options.prompt}"
    console = report.console()
    console.print(f"{size}; {options.threads} threads of {timing.machine()}", highlight=False)
    console.print(report.table(found, [*sides, "read"]))
    console.print(f"a token reads {nbytes / 2**20:.0f} MiB, at {speed[best]:.1f} GB/s ({best})", highlight=False)
    alike = ", ".join(f"{name} {x:.4f}" for name, x in likeness.items())
    console.print(f"cosine of the first logits with those of the weights before packing: {alike}", highlight=False)
    if (elsewhere := others()) is not None:
        console.print(f"other processes took {elsewhere:.2f} cores", highlight=False)
    if options.json is not None:
        figures = {"options": asdict(options), "rows": [row._asdict() for row in found], "cosines": likeness}
        report.write(options.json, figures | {"bytes": nbytes, "read_gb_s": speed, "others": elsewhere})
    return 0


if __name__ == "__main__":
    sys.exit(main())
