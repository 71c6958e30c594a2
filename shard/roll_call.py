"""The roll call: before ranks communicate, each says what it is about to do, and all continue or all raise.

    announce("all_reduce sum float32[64]", group)    # returns once every rank of the group has announced the same

A collective that only some ranks enter does not fail by itself. gloo waits for half an hour and names an address. With
another order of two collectives of one shape it adds up numbers of different meaning. So every collective
of shard/ that is not captured begins with a roll call. So do comparisons of shard/agree.py, the close of the mesh, and
each replay of a captured step that communicates (fquant/compile/collective_check.py). A replay announces a digest of
the step's collectives. The ranks of a group number their calls.

A rank that waits learns of these, and raises RuntimeError with the ranks, and the text and the caller's line of each:

    another text         the ranks of a group announce different things
    a rank has gone      it raised, ended, was killed, or left the group: its connection closes, after its last words
    a rank is silent     it has not answered for 6 s, and does not run: it is stopped, its machine is lost, or the cable
                         is cut
    a wait in a circle   each rank waits for the next, in calls of different groups

The last two need questions. Every half second a rank that waits asks those it waits for, and those they wait for, what
they do. The threads of the control plane answer. A circle counts if it stands in three rounds of answers with the same
calls, because then no rank in it can have moved. A rank that computes and answers is waited for without a limit.
So is a rank that keeps Python's lock and cannot answer, as long as its process runs (transport/liveness.py).

The ranks of a collective or a replay are asked also while tensors travel over gloo or through shared memory
(``transfer``). If one is silent or has failed, the transport's wait is ended, and raises this error within 10 s of the
loss. In the middle of a message gloo cannot be ended. Then the process ends, with the error on stderr and status 1.

After an error the calls of ranks no longer correspond, so every later roll call of this mesh raises it again.

The cost is a message to each other rank of the group. On two cores a roll call of 2 ranks takes 0.1 to 0.3 ms, of 3
ranks 0.3 to 0.4 ms. In a replay that replaces an all-gather over gloo, which takes as long. A group that
``shard.mesh`` did not make, or without a mesh, has no roll call. Those of one rank and abstract meshes need none.
"""

import functools
import json
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.util import Finalize

import torch.distributed as dist

from fquant.compile import all_gather_text, exchange_by

from .transport import connections, shared_memory
from .transport.desync import Members, RollCall

_KNOWN: weakref.WeakKeyDictionary[dist.ProcessGroup, RollCall] = weakref.WeakKeyDictionary()  # by that of all ranks
_MEMBERS: weakref.WeakKeyDictionary[dist.ProcessGroup, Members] = weakref.WeakKeyDictionary()
_CONNECTIONS: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()


def start(seconds: float) -> None:
    """Connect all ranks of the job, unless they are or there is one: a collective.

    Raises RuntimeError on every rank if one cannot be reached within ``seconds``.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1 or world in _KNOWN:
        return
    _say_end_at_exit(os.getpid())
    roll = RollCall(world.rank(), _interrupt)
    roll.connect(world.size(), all_gather_text, seconds)
    _KNOWN[world] = roll
    weakref.finalize(world, roll.close)


def announce(what: str, group: dist.ProcessGroup | None = None, leaves: Sequence[str] = ()) -> None:
    """Wait until every rank of ``group``, by default of the job, has announced ``what``; see the module.

    ``leaves`` are the paths, dtypes and shapes of a tree that travels in one tensor, on which ranks must agree too.
    """
    _exchange("\n".join([what, *leaves]), what, "", group)


def _exchange(kind: str, what: str, payload: str, group: dist.ProcessGroup | None = None) -> list[str] | None:
    """Return the payload of every rank of ``group``, or None without a roll call."""
    world = dist.group.WORLD
    if world is None or (roll := _KNOWN.get(world)) is None:
        return None
    over = _members(group or world)
    if len(over.ranks) == 1:
        return [payload]
    if (group or world) not in _CONNECTIONS:
        _CONNECTIONS[group or world] = _connections(roll, over, what)
    return roll.gather(over, kind, what, payload)


def _connections(roll: RollCall, over: Members, what: str) -> set[tuple[str, ...]]:
    """Return this process's connections to the other ranks of ``over``, but for those of the control plane."""
    mine = connections.open_now()
    every = [json.loads(text) for text in roll.gather(over, "connections", what, json.dumps(mine))]
    return connections.between(mine, [ends for theirs in every for ends in theirs]) - roll.connections()


def _interrupt() -> None:
    """End all waits for other ranks, in the thread of the control plane."""
    shared_memory.interrupt()
    connections.end(set().union(*list(_CONNECTIONS.values())))


@contextmanager
def transfer(group: dist.ProcessGroup | None = None, alone: bool = False) -> Iterator[None]:
    """Watch the ranks of ``group``, by default of the job, while the tensors of what was announced last travel.

    Ends the transfer, and raises RuntimeError, if a rank is silent or has gone, which it names. With ``alone`` an error
    may be that of this rank only, and the others learn of it.
    """
    world = dist.group.WORLD
    roll = None if world is None else _KNOWN.get(world)
    with nullcontext() if world is None or roll is None else roll.transfer(_members(group or world), alone):
        yield


def lost() -> str:
    """Return which ranks of the job are known to have gone, without waiting, or nothing; may be called at any time."""
    world = dist.group.WORLD
    roll = None if world is None else _KNOWN.get(world)
    return "" if world is None or roll is None else roll.gone(_members(world))


def _members(group: dist.ProcessGroup) -> Members:
    if group not in _MEMBERS:
        ranks = tuple(dist.get_process_group_ranks(group))
        spanning = len(ranks) == dist.get_world_size()
        label = "all ranks" if spanning else group.group_desc.removeprefix("mesh_")
        _MEMBERS[group] = Members("all" if spanning else ",".join(map(str, ranks)), ranks, label)
    return _MEMBERS[group]


def _say_end() -> None:
    """Send last words at the end of the process, with the error that ends it."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    words = "has ended" if error is None else f"raised {type(error).__name__}: {error}"
    for roll in list(_KNOWN.values()):
        roll.say(words, failed=error is not None)


@functools.cache
def _say_end_at_exit(process: int) -> None:
    Finalize(None, _say_end, exitpriority=100)  # at the end of a process that multiprocessing started, too


exchange_by(_exchange, functools.partial(transfer, alone=True))
