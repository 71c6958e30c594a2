"""Hashes of small runs, which show that a change of the source changes no result.

    python -m tests.hashes --out hashes.json             # record them: some minutes on two cores
    python -m tests.hashes --against hashes.json         # run again, and print which runs differ
    python -m tests.hashes --out hashes.json --only mesh # the runs whose names begin with "mesh"

A run is a function without arguments whose result is a tree of tensors, numbers and texts. The runs of programs hash
what they write: tensors, losses, configs, exported files and generated texts, and neither times nor paths. Record the
hashes and compare them on the same machine with the same torch. The exit status is 1 if a run differs or fails.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file
from torch.func import grad_and_value

from fquant import AQ_2X8, INT4_ZERO, NF4_DQ, calibration, jit, linear, lora, optim, quantize, random, tree, vq
from models import decoder, encoder, generate
from tests.bench import report
from tests.helpers import defaults, hf_models
from tests.helpers.model_folders import tiny_model
from tests.helpers.models import encoders
from tests.helpers.optim import runs as optimisers
from tests.helpers.vq import family

ROOT = Path(__file__).parents[1]
LINE = ("loss", "lr", "grad_norm", "validation")  # of a line of metrics.jsonl, what depends on no clock
TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(400))
PAIRS = [{"prompt": f"f{i}(", "chosen": f"x, {i})", "rejected": f"{i * 7}"} for i in range(30)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i + 1}."}]}
    for i in range(40)
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Hash the results of small runs, and compare them with hashes that were recorded before."""

    out: Path | None = None
    """Write the hashes to this JSON file."""
    against: Path | None = None
    """Compare the hashes with those of this JSON file."""
    only: str = ""
    """Run only the runs whose names begin so."""


# --- functions --------------------------------------------------------------------------------------------------------


def trained_decoder(cfg: Any) -> Any:
    """Return logits, a gradient of adapters (eager and captured) and generated tokens of a packed decoder."""
    params = hf_models.random_params(cfg)
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", partial(quantize, format=NF4_DQ), params)
    adapters = lora.init(base, r"layers\.\d+\.(q|v|down)", 4, key=1)
    adapters = tree.map(lambda t: t + 0.01, adapters)
    tokens = torch.arange(2 * 40).reshape(2, 40) * 7 % cfg.vocab

    def loss(adapters: Any, base: Any, tokens: Any) -> Any:
        return decoder.loss(lora.attach(base, adapters), tokens[:, :-1], tokens[:, 1:], cfg)

    step = grad_and_value(loss)
    logits = decoder.forward(lora.attach(base, adapters), tokens, cfg)
    texts = generate.generate(lora.attach(base, adapters), [[5, 9, 2], [7]], cfg, max_new_tokens=8)
    return logits, step(adapters, base, tokens), jit(step)(adapters, base, tokens), texts


def run_encoder(cfg: Any) -> Any:
    """Return what an encoder and the heads that it has compute."""
    params = encoders.random_params(cfg)
    x = encoder.forward(params, encoders.TOKENS, cfg, segments=encoders.MASK)
    heads = {"masked_lm": cfg.masked_lm, "classify": cfg.num_labels, "pooled": cfg.pooler}
    return x, [getattr(encoder, name)(params, x, cfg) for name, present in heads.items() if present]


def optimised(opt: Any) -> Any:
    """Return parameters and state after steps of an optimiser, with a key for stochastic rounding and without."""
    params, gradients = optimisers.leaf((32, 96), steps=4)
    low = tree.map(lambda t: t.bfloat16(), params)
    return optimisers.ours(opt, params, gradients), optimisers.ours(opt, low, gradients, key=random.key(3))


def quantised(make: Callable[[], Any], module: Any, dim: int) -> Any:
    """Return a state of a quantiser, and what ``apply`` computes with it."""
    state = make()
    x = defaults.X[:, :dim].repeat(4, 1) * torch.linspace(0.2, 3, 20)[:, None]
    return state, module.apply(state, x)


def calibrated(method: Any) -> Any:
    """Return a weight that is packed with the statistics of its inputs."""
    loss = lambda params, x: linear(x, params["w"]).square().sum()
    return calibration.calibrate({"w": defaults.W}, [defaults.X, 2 * defaults.X], loss, "w", method)


# --- programs ---------------------------------------------------------------------------------------------------------


def contents(path: Path) -> Any:
    """Return what a file holds that depends on the computation alone."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.name == "metrics.jsonl":
        return [{name: x[name] for name in LINE if name in x} for x in map(json.loads, path.read_text().splitlines())]
    if path.suffix in (".png", ".html") or path.name in ("run.json", "result.json", "manifest.json"):
        return None
    return path.read_bytes()


def written(folder: Path) -> Any:
    """Return the contents of all files of a folder, by name."""
    return {str(file): contents(file) for file in sorted(folder.rglob("*")) if file.is_file()}


def program(*lines: str) -> Any:
    """Run programs, a line each with a name and options; return what is printed as JSON and what is in ``out``."""
    with tempfile.TemporaryDirectory() as at, contextlib.chdir(at):
        prepare(Path(at))
        env = os.environ | {"XDG_CACHE_HOME": at, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        told = list[Any]()
        for name, *args in map(str.split, lines):
            command = [sys.executable, "-m", f"examples.{name}", *args]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command[2:])} ended with status {done.returncode}: {done.stderr[-300:]}")
            told += [_untimed(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
        return told, written(Path("out"))


def _untimed(x: Any) -> Any:
    """Return a printed object without its times."""
    return {key: value for key, value in x.items() if not any(word in key for word in ("second", "time", "memory"))}


def prepare(folder: Path) -> None:
    """Write a model, a text, a template, pairs and chats into ``folder``."""
    tiny_model(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    (folder / "template.jinja").write_text(CHATML)
    for name, rows in (("pairs", PAIRS), ("chats", CHATS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


QLORA = "qlora --model model --data text.txt --seq 32 --batch 4 --steps 3 --out out"
GENERATED = "generate --model model --prompt def --max-new-tokens 8 --json"
PROGRAMS: dict[str, tuple[str, ...]] = {
    "qlora": (QLORA,),
    "qlora dense": (f"{QLORA} --format none --dtype f32 --checkpoint selective",),
    "qlora int8_row": (f"{QLORA} --format int8_row --accumulate 2 --moments dynamic8 --optimizer lion",),
    "qlora dora": (f"{QLORA} --dora --dropout 0.1 --targets q,v --rank-stabilised --validate-every 2",),
    "qlora merge-aware": (f"{QLORA} --format nf4 --merge-aware",),
    "qlora chats": (f"{QLORA} --data chats.jsonl --chat-template template.jinja --checkpoint full",),
    "qlora offload": (f"{QLORA} --offload block --offload-activations",),
    "qlora dpo": (f"{QLORA} --data pairs.jsonl --objective dpo --beta 0.5",),
    "qlora orpo": (f"{QLORA} --data pairs.jsonl --objective orpo",),
    "qlora distill": (f"{QLORA} --objective distill --teacher model",),
    "qlora full": (f"{QLORA} --train full --format none --moments dynamic4",),
    "qlora full int8": (f"{QLORA} --train full --format int8_row --moments dynamic8",),
    "qlora resume": (f"{QLORA} --steps 2 --save-every 1", "qlora --resume out --steps 4"),
    "pretrain": ("pretrain --steps 2 --warmup 1 --seq 32 --out out",),
    "sweep": (f"{QLORA.replace('qlora', 'sweep')} --vary lr=1e-4,1e-3 rank=4,8",),
    "vqvae": ("vqvae --steps 3 --batch 4 --dim 8 --hidden 16 --codes 32 --out out",),
    "vqvae residual": (
        "vqvae --quantiser fsq --layers 2 --steps 3 --batch 4 --dim 8 --hidden 16 --codes 60 --out out",
    ),
    "quantize": ("quantize model out --format int4_zero",),
    "evaluate": ("evaluate --model model --formats none nf4 int8 mxfp4 --data text.txt --rows 2 --seq 32 --json",),
    "generate": (GENERATED, f"{GENERATED} --temperature 0.8 --top-k 20 --seed 3 --format int8_row"),
    "plan": ("plan --model model --mesh fsdp=2 dp=2,fsdp=4 --device h100 --seq 64 --json",),
    "merge": (f"{QLORA} --out run", "merge model run/adapter out"),
    "export gguf": ("export model out/q8.gguf --kind q8_0", "export model out/q4.gguf --kind q4_0"),
    "export bitsandbytes": ("export model out --to bnb-nf4-dq",),
    "export compressed-tensors": ("export model out --to compressed-tensors",),
}
MESHES = ("fsdp=2", "fsdp=3", "dp=2", "dp=2,fsdp=2")
PROGRAMS |= {f"mesh {mesh}": (f"{QLORA} --mesh {mesh}",) for mesh in MESHES}
PROGRAMS |= {f"mesh {mesh}, full": (f"{QLORA} --mesh {mesh} --train full --format none",) for mesh in MESHES}
PROGRAMS["mesh fsdp=2, unordered"] = (f"{QLORA} --mesh fsdp=2 --ordered False",)
METHODS = {
    "gptq": calibration.gptq(INT4_ZERO),
    "awq": calibration.awq(INT4_ZERO),
    "hqq": calibration.hqq(INT4_ZERO),
    "importance": calibration.importance(AQ_2X8),
}
OPTIMISERS = {
    "adamw": optim.adamw(1e-2),
    "adamw dynamic8": optim.adamw(1e-2, moments=optim.DYNAMIC8),
    "adam dynamic4": optim.adam(1e-2, moments=optim.DYNAMIC4),
    "lion fp8": optim.lion(1e-3, moments=optim.FP8),
    "sgd": optim.sgd(1e-2, momentum=0.9),
    "muon": optim.muon(1e-2),
    "adafactor": optim.adafactor(1e-2),
}
QUANTISERS = {
    **{name: (make, getattr(vq, name, vq), 8) for name, make in defaults.STATES.items() if name != "parted"},
    **{f"{name} books": (make, module, family.DIM) for name, (module, make) in family.STATES.items()},
}
RUNS: dict[str, Callable[[], Any]] = {
    **{f"computed {name}": compute for name, compute in defaults.COMPUTED.items()},
    **{f"decoder {name}": partial(trained_decoder, cfg) for name, cfg in hf_models.CONFIGS.items()},
    **{f"encoder {name}": partial(run_encoder, cfg) for name, cfg in encoders.CONFIGS.items()},
    **{f"calibration {name}": partial(calibrated, method) for name, method in METHODS.items()},
    **{f"optim {name}": partial(optimised, opt) for name, opt in OPTIMISERS.items()},
    **{f"vq {name}": partial(quantised, *given) for name, given in QUANTISERS.items()},
    **{name: partial(program, *lines) for name, lines in PROGRAMS.items()},
}


def digest(x: Any) -> str:
    """Return the hash of a tree: of the paths, dtypes, shapes and bytes of tensors, and of what else is a leaf."""
    found = hashlib.sha256()
    for path, leaf in tree.items(x):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(f"{path} {leaf!r}".encode())
    return found.hexdigest()[:24]


def hashed(name: str) -> str:
    """Return the hash of a run, or its error."""
    try:
        return digest(RUNS[name]())
    except Exception as error:  # a result like another, which is compared and printed
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def main() -> int:
    """Hash the runs, compare the hashes, and return the exit status."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    names = [name for name in RUNS if name.startswith(options.only)]
    found = {name: hashed(name) for name in track(names, "hashing", console=Console(stderr=True))}
    faults = [f"{name}: {value}" for name, value in found.items() if ":" in value]
    if options.against:
        before = json.loads(options.against.read_text())
        faults += [
            f"{name}: {before.get(name)} before, {found[name]} now" for name in names if before.get(name) != found[name]
        ]
    if options.out:
        report.write(options.out, found)
    print(*faults, f"{len(names)} runs, {len(faults)} differ or fail", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
