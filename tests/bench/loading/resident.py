"""Memory of one process that loads and quantises a checkpoint: ``python -m tests.bench.loading.resident DIR FORMAT 2``.

Prints JSON in bytes: the most that was resident while it loaded, over that before; that of the result; and the sizes
of the largest tensor and of the largest one that is quantised. Linux keeps the peak, and resets it on request.
"""

import json
import sys
from pathlib import Path

import torch

from fquant import Packed, quantize, tree
from fquant.format import FORMATS
from models import hf
from tests.bench.loading.__main__ import load


def resident(key: str) -> int:
    """Return the bytes of ``key`` in /proc/self/status: VmRSS now, or VmHWM, the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def main(folder: str, name: str, threads: str) -> None:
    """Load, and print the figures."""
    torch.set_num_threads(int(threads))
    format = FORMATS[name]
    for device in ("cpu", "meta"):  # threads and modules that the first calls start and import
        quantize(torch.randn(256, 4096, device=device), format)
    _, likes = hf.lazy(folder)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    params = load(Path(folder), format)
    peak = resident("VmHWM")
    packed = dict(tree.items(params, is_leaf=lambda x: isinstance(x, Packed)))
    sizes = {path: tree.nbytes(leaf.like) for path, leaf in tree.items(likes)}
    figures = {"load": peak - before, "result": tree.nbytes(params), "largest tensor": max(sizes.values())}
    figures["largest quantised"] = max(sizes[path] for path, x in packed.items() if isinstance(x, Packed))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
