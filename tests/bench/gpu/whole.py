"""Whole programs on a device: tests of the kernels, the job beside the host's, and meshes."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.func import grad_and_value

import shard
from examples.common.command_line import pattern, quantised
from examples.common.progress import metrics
from fquant import NF4_DQ, jit, lazy, lora, tree
from models import decoder
from models.config import Config

from .lines import ROOT, Item, Result, at_most
from .step import TARGETS, Case, Running, random_weights, shard_closed

TINY = Config(512, 128, 2, 4, 2, 32, 256, max_positions=256)
PARTS = ("formats", "products", "integers", "draws", "losses", "norms")


def checks(device: torch.device | None, seed: int, sanitizer: bool) -> Iterator[Item]:
    """Yield a line for each kind of kernel, one for each test file, and those of compute-sanitizer."""
    if sanitizer:
        yield Item("compute-sanitizer memcheck", "0 errors", partial(sanitized, seed), minutes=1)
        return
    for part in PARTS:
        yield Item(part, "equal to the reference", partial(checked, part, device, seed))
    yield Item("a weight of 2 to the 31 elements", "equal to the reference", partial(big, device, seed), minutes=0.5)
    for path in files():
        yield Item(f"pytest {path}", "passes", partial(tested, path, device), minutes=0.5)


def checked(part: str, device: torch.device | None, seed: int) -> Result:
    """Compare one kind of kernel with the reference."""
    from . import reference

    with reference.exact(), reference.poisoned():
        counts = getattr(reference, f"check_{part}")(str(device), seed)
    return Result(", ".join(f"{n} {what}" for what, n in counts.items()), True)


def big(device: torch.device | None, seed: int) -> Result:
    """Compare the ends of a big weight."""
    from . import reference

    with reference.exact():
        counts = reference.check_big(str(device), seed, reference.BIG)
    return Result(", ".join(f"{n} {what}" for what, n in counts.items()), True)


def files() -> list[str]:
    """Return the test files that use the fixture ``device``."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    uses = re.compile(r"^def test_\w+\((?:.*\b)?device\b", re.M)
    mine = [p for p in found if p.parent != Path(__file__).parent and uses.search(p.read_text())]
    return [str(p.relative_to(ROOT)) for p in mine if p.name != "test_device.py"]


def tested(path: str, device: torch.device | None) -> Result:
    """Run a test file with ``--device``."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", path, "--device", str(device)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    lines = done.stdout.strip().splitlines() or ["no output"]
    last = next((line for line in reversed(lines) if re.search(r"passed|failed|error", line)), lines[-1])
    return Result(last[:120], done.returncode == 0)


def sanitized(seed: int) -> Result:
    """Run the checks of products and draws under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        return Result("not measured: compute-sanitizer is not installed")
    code = "from tests.bench.gpu import reference as r; "
    code += f"print(r.check_draws('cuda', {seed}, 2001), r.check_losses('cuda', {seed}, (7, 300)), "
    code += f"r.check_norms('cuda', {seed}, (7, 300)), r.check_big('cuda', {seed}, (80, 320)))"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "7", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line] or [f"exit {done.returncode}"]
    return Result(summary[-1].strip("= "), done.returncode == 0)


def job(device: torch.device | None, steps: int) -> Iterator[Item]:
    """Yield the line of the losses of examples.qlora beside those of the host, for two dtypes."""
    for dtype in ("bf16", "f32"):
        yield Item(
            f"examples.qlora, {dtype}: losses off the host's", "at most 1e-3", partial(compared, device, steps, dtype)
        )


def compared(device: torch.device | None, steps: int, dtype: str) -> Result:
    """Run the job on the device and on the host, and return the largest difference of their losses."""
    with tempfile.TemporaryDirectory() as folder:
        losses = []
        for name in (str(device), "cpu"):
            out = Path(folder) / (name.replace(":", "") + ("-host" if losses else ""))
            command = [sys.executable, "-m", "examples.qlora", "--device", name, "--mesh", "fsdp=1", "--out", str(out)]
            command += ["--steps", str(steps), "--dtype", dtype]
            command += ["--checkpoint", "selective", "--compare-dense", "False"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
            if done.returncode:
                raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
            losses.append([step["loss"] for step in metrics(out)])
    off = [abs(a - b) for a, b in zip(*losses, strict=True)]
    return at_most(max(off), 1e-3, f"at most, {losses[0][0]:.4f} to {losses[0][-1]:.4f}", "{:.2e}")


def meshes(device: torch.device | None) -> Iterator[Item]:
    """Yield the lines of a mesh of one rank: equal to no mesh, and captured."""
    yield Item("mesh of one rank", "equal to no mesh in every bit", partial(one_rank, device))
    yield Item("captured step on a mesh of one rank, its losses", "equal to the uncaptured", partial(captured, device))


def one_rank(device: torch.device | None) -> Result:
    """Compare loss and gradients on a mesh of one rank with those of no mesh."""
    assert device is not None
    torch.manual_seed(0)
    base = lazy.read(quantised(random_weights(TINY, device), NF4_DQ))
    adapters = lora.init(base, pattern(TARGETS), 4, key=0)
    tokens = torch.arange(2 * 65, device=device).reshape(2, 65) % TINY.vocab
    with shard_closed():
        mesh = shard.mesh(device, fsdp=1)
        placed = shard.local(shard.place(base, decoder.dims(TINY), shard.Rules(), mesh, TINY))
        comm = shard.comm(mesh, shard.Rules())

        def loss(adapters: Any, base: Any, tokens: Any, *comm: Any) -> Any:
            params = lora.attach(base, adapters)
            return decoder.loss(params, tokens[:, :-1], tokens[:, 1:], TINY, *comm)

        alone = jit(grad_and_value(loss))(adapters, base, tokens)
        sharded = jit(lambda *args: shard.reduce(grad_and_value(lambda *a: loss(*a, comm))(*args), mesh))
        both = alone, sharded(adapters, placed, tokens)
        same = all(map(torch.equal, *map(tree.leaves, both)))
    return Result(f"loss {float(both[0][1]):.6f} and {float(both[1][1]):.6f}", same)


def captured(device: torch.device | None) -> Result:
    """Compare the losses of captured steps with those of uncaptured ones."""
    assert device is not None
    case, found = Case(TINY, 2, 64, "full"), []
    for how in ("captured", "uncaptured"):
        torch.manual_seed(0)
        with shard_closed():
            running = Running(case, device, how)
            found.append([float(running.take()) for _ in range(4)])
    off = max(abs(a - b) for a, b in zip(*found, strict=True))
    return at_most(off, 0.0, f"off, {found[0][0]:.4f} to {found[0][-1]:.4f}", "{:.2e}")
