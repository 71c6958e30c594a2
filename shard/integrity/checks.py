"""The comparison of copies on several ranks, and of frozen bytes with a record of them."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree
from fquant.compile import all_gather_text

from ..bundle import Bundle
from ..checkpoint.local_ranges import local_ranges
from ..device_mesh import position
from ..rules import Rules
from .hashing import digest, runs

TURNS = 8  # checks in which all frozen bytes are compared
FIX = "continue from the last saved state, and without the machine of that rank if it happens again"


class Diverged(RuntimeError):
    """Ranks, or a rank and its own record, that have other bits where all must have the same."""


def check_copies(what: str, x: Any, mesh: DeviceMesh, rules: Rules) -> None:
    """Check that ranks have equal bits where several have the same part of the tree ``x``, placed or local.

        dp 0, fsdp 0   FloatBundle(a), c        a is compared with the a of dp 1, c with that of all ranks
        dp 0, fsdp 1   FloatBundle(b), c
        dp 1, fsdp 0   FloatBundle(a), c
        dp 1, fsdp 1   FloatBundle(b), c

    A part that one rank has alone is not read. One exchange of texts, and a second if parts differ; nothing on one
    device. Raises Diverged on every rank, with the first tensor that differs and the ranks in the minority.
    """
    part, ranks = position(mesh, rules.block or ())[0], mesh.size()
    shared: dict[str, dict[str, Tensor]] = {"": {}, str(part): {}}  # copies of all ranks, and of those with this part
    for it in local_ranges(tree.map(Tensor.contiguous, x), mesh, rules):
        if it.copies > 1:
            shared["" if it.copies == ranks else str(part)][it.name] = it.values
    if not any(shared.values()):
        return
    brief = {key: "".join(_texts(runs(of.values()))) for key, of in shared.items()}
    brief = {key: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for key, text in brief.items()}
    if not _differing([json.loads(text) for text in _gather(brief, what)]):
        return
    each = {key: dict(zip(of, _texts(of.values()), strict=True)) for key, of in shared.items()}
    tables = [json.loads(text) for text in _gather(each, what)]
    for key in sorted({key for table in tables for key in table}):
        those = {rank: table[key] for rank, table in enumerate(tables) if key in table}
        if names := _differing(list(those.values())):
            seen = {rank: table.get(names[0], "nothing") for rank, table in those.items()}
            fault = f"{what}: {_minority(seen)} at {names[0]}"
            raise Diverged(f"{fault}, the first of {len(names)} tensors that differ; {FIX}")


def record(x: Any) -> dict[str, str]:
    """Return the digest of the bytes of each block of the local tree ``x`` on this rank, by its path; no collective."""
    blocks = _blocks(x)
    return dict(zip(blocks, _texts(blocks.values()), strict=True))


def check_record(what: str, x: Any, known: Mapping[str, str], turn: int) -> None:
    """Compare blocks of the local tree ``x`` with this rank's :func:`record` of them: each in one of ``TURNS`` turns.

    ``turn`` counts checks, and is the same on every rank. One exchange of texts, none if there are no blocks. Raises
    Diverged on every rank, with the blocks that differ and their ranks.
    """
    blocks = _blocks(x)
    if not blocks:
        return
    names = list(blocks)[turn % TURNS :: TURNS]
    now = dict(zip(names, _texts(blocks[path] for path in names), strict=True))
    changed = [path for path in names if now[path] != known[path]]
    everywhere = [json.loads(text) for text in _gather(changed, what)]
    odd = {rank: ", ".join(some) for rank, some in enumerate(everywhere) if some}
    if faults := [f"rank {rank} has other bits than were placed in {paths}" for rank, paths in odd.items()]:
        raise Diverged(f"{what}: {'; '.join(faults)}; {FIX}")


def _blocks(x: Any) -> dict[str, Tensor]:
    is_bundle = lambda y: isinstance(y, Bundle)
    return {path: leaf.bytes if is_bundle(leaf) else leaf for path, leaf in tree.items(x, is_leaf=is_bundle)}


def _texts(tensors: Iterable[Tensor]) -> list[str]:
    """Return digests as text, with one wait for each device."""
    found = [digest(t) for t in tensors]
    numbers: dict[int, int] = {}
    for device in {t.device for t in found}:
        there = [i for i, t in enumerate(found) if t.device == device]
        numbers |= zip(there, torch.stack([found[i] for i in there]).tolist(), strict=True)
    return [f"{numbers[i] % (1 << 64):016x}" for i in range(len(found))]


def _gather(x: Any, what: str) -> list[str]:
    return all_gather_text(json.dumps(x), f"comparison of bits: {what}")


def _differing(tables: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys, in order, that have several values in the ``tables`` that have them."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if len({table[key] for table in tables if key in table}) > 1]


def _minority(seen: Mapping[int, str]) -> str:
    """Return which ranks have other bits than most; all, if most have no bits in common."""
    (common, count), *rest = Counter(seen.values()).most_common()
    named = lambda ranks: f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    odd = [rank for rank, text in seen.items() if text != common]
    if rest and rest[0][1] == count:
        return f"{named(list(seen))} have different bits, and none is in the minority,"
    others = [rank for rank, text in seen.items() if text == common]
    return f"{named(odd)} {'have' if odd[1:] else 'has'} other bits than {named(others)}"
