"""Check that all ranks are about to run the same captured function, and raise instead of waiting for each other.

Every rank of the default process group calls a captured function that communicates, in the same order. If the order
differs, ranks wait in collectives that others never enter, or sum one rank's gradients with another's logits.

So before each replay all ranks exchange eight bytes, in one all-gather: a digest of the function's name and of its
collectives. A collective counts by what ranks have in common: op, options, dtype and shape of the gathered or summed
buffer, and size of the group. If a buffer holds a tree, the paths, dtypes and shapes of its leaves count too, which the
trace has noted. If digests differ, all ranks raise one error, which says what each was about to run.

A rank that does not come is waited for until its connections close, or until the group's time-out. The error then names
the function. Two functions of one name and collectives are not distinguished.

A package with a transport of its own gives it to ``exchange_by``. It then carries these messages, and may compare them
with calls that are not captured and name the rank that does not come (shard/roll_call.py).
"""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..device import HOST
from . import graph

Exchange = Callable[[str, str, str], list[str] | None]
Watch = Callable[[], AbstractContextManager[None]]
_exchange: Exchange = lambda kind, what, payload: None
_watch: Watch = lambda: nullcontext()


def exchange_by(exchange: Exchange, watch: Watch) -> None:
    """Let ``exchange(kind, what, payload)`` gather texts: the ``payload`` of every rank, by rank, or None if it cannot.

    All ranks exchange the same ``kind`` at a time, for which errors have the text ``what``. A replay runs inside
    ``watch()``, which may end it by a RuntimeError that names ranks without which it cannot end.
    """
    global _exchange, _watch
    _exchange, _watch = exchange, watch


def watched(collectives: Sequence[str]) -> AbstractContextManager[None]:
    """Watch the other ranks during a replay that communicates."""
    return _watch() if collectives else nullcontext()


def check_ranks_agree(name: str, collectives: Sequence[str]) -> None:
    """Raise RuntimeError on every rank unless all are about to run ``name``, with the same ``collectives``.

    Nothing is exchanged without collectives, on one rank, and in a group of the backend "fake".
    """
    if not collectives or not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    text = "\n".join([name, *collectives])
    with _disable_current_modes():  # a mode that counts ops must count those of the function only
        try:
            digest, what = _digest(text), f"replay of jit({name})"
            digests = _exchange("replay", what, str(digest)) or _gather([digest], torch.int64)
            if all(digest == digests[0] for digest in digests):
                return
            runs = [each.split("\n") for each in all_gather_text(text, "replays that differ")]
        except RuntimeError as error:
            raise RuntimeError(f"jit({name}): not every rank came to run it: {error}") from error
    raise RuntimeError(_difference(runs))


def all_gather_numbers(mine: list[int]) -> list[list[int]]:
    """Gather the numbers of every rank of the default group on every rank, by rank; each rank has the same count."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return [mine]
    if (found := _exchange("numbers", "exchange of numbers", json.dumps(mine))) is not None:
        return [json.loads(text) for text in found]
    with _disable_current_modes():
        return _gather(mine, torch.int64)


def all_gather_text(text: str, what: str = "exchange of texts") -> list[str]:
    """Gather ``text`` of every rank on every rank; characters outside UTF-8, in a file's name say, arrive escaped.

    ``what`` names the exchange in errors; it is the same on every rank.
    """
    data = text.encode(errors="backslashreplace")
    if (found := _exchange(what, what, data.decode())) is not None:
        return found
    mine = list(data)
    lengths = [n for (n,) in _gather([len(mine)], torch.int64)]
    texts = _gather(mine + [0] * (max(1, *lengths) - len(mine)), torch.uint8)
    return [bytes(each[:n]).decode() for each, n in zip(texts, lengths, strict=True)]


def collectives(g: Graph) -> tuple[str, ...]:
    """Return the collectives of a graph, in order, by what ranks have in common: ``all_reduce sum float32[64] over 2``.

    Raises TypeError for those of torch.distributed itself, which a replay would not wait for.
    """
    for node in g.nodes:
        if str(node.target).startswith("c10d."):
            raise TypeError(
                f"jit: the function uses {str(node.target).rpartition('.')[0]}, a collective in place, which a replay "
                "would not wait for; use a functional one, such as shard.all_reduce"
            )
    return tuple(_description(node) for node in g.nodes if graph.collective(node))


def ranks(node: Node) -> int:
    """Return the size of the group of a collective."""
    return dist.distributed_c10d._resolve_process_group(str(node.args[-1])).size()  # type: ignore[arg-type]


def _description(node: Node) -> str:
    name, options = str(graph.collective(node)), [str(x) for x in node.args[1:-1] if isinstance(x, str | int)]
    if name.startswith("all_to_all"):  # ranks may send different shapes
        return f"{name} over {ranks(node)}"
    given = [t for near in node.all_input_nodes for t in graph.tensors(near)]
    whole = max(graph.tensors(node), given, key=lambda ts: sum(t.numel() for t in ts))
    return " ".join([name, *options, *map(graph.describe, whole), f"over {ranks(node)}"])


@functools.lru_cache
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _gather(mine: list[int], dtype: torch.dtype) -> list[list[int]]:
    """Gather the numbers of every rank, by rank; each has the same count."""
    t = torch.tensor(mine, dtype=dtype, device=HOST)
    out = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t)
    return [each.tolist() for each in out]


def _difference(runs: list[list[str]]) -> str:
    """Return the error: the function of each rank, with the first collective that differs if names are equal."""
    place = next(i for i in range(max(map(len, runs))) if len({tuple(run[i : i + 1]) for run in runs}) > 1)
    seen: dict[str, list[int]] = {}
    for rank, run in enumerate(runs):
        found = run[place] if place < len(run) else "nothing"
        number = place - sum(line.startswith(graph.LEAF) for line in run[:place])
        detail = found if found.startswith(graph.LEAF) else f"collective {number}: {found}"
        seen.setdefault(run[0] if place == 0 else f"{run[0]} ({detail})", []).append(rank)
    text = [f"rank{'s' * (len(members) > 1)} {', '.join(map(str, members))} {run}" for run, members in seen.items()]
    return (
        f"jit: ranks are about to run different things: {'; '.join(text)}; "
        "call captured functions that communicate on every rank, in the same order"
    )
