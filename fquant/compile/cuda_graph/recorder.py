"""Recorders: what records the work of a device once, at fixed addresses, and launches it again.

``Cuda`` is that of CUDA, by ``torch.cuda.CUDAGraph``. All recordings of a device share one private pool of memory,
because nothing in it is live between replays.

*The pool* is that of torch's caching allocator, and not a plan as on CPUs (fquant.compile.memory). While a graph is
recorded, a tensor's memory is free behind its last use. So both hold the same bytes, and differ in fragments. For the
QLoRA step of Llama-3-8B the model of the allocator in ``tests/helpers/graphs/caching_allocator.py`` gives, in MiB:

    step                                        4 x 2048, selective    1 x 2048, full
    live at the peak with its slabs, beside arguments         24384               985
    planned, if every op could write to a plan                24384               978
    pool, every segment as it comes                           24814              1362
    pool that begins with one segment of the peak             24780              1154

An op can be planned only if it computes into given memory, which kernels in Triton do not. A plan of torch's ops alone
needed 25078 and 1118 with the pool beside it. So the pool begins with one segment of the peak, which is freed at once.
It is then cut as a plan would be, and every op is served. Beside 5.8 GiB of arguments, 2 % more memory would be saved
by a plan of all ops.

*Streams.* A recording is made on a side stream. So is the warm-up, in which libraries allocate what they keep for it. A
replay runs on the current stream, after the replay before it, even if that was on another stream.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..tracing.collector import uncollected

R = TypeVar("R")


class Recorder(Protocol):
    """Record work of a device at fixed addresses, and launch it again."""

    def is_recording(self) -> bool:
        """Return True while the current stream is recorded, by this recorder or another."""
        ...

    def warm_up(self, run: Callable[[], R]) -> R:
        """Return ``run()``, after which the same work can be recorded."""
        ...

    def record(
        self, run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], nbytes: int
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Record ``run(*tensors)`` without computing, in a pool of ``nbytes`` or more.

        Return the function that launches it, and its results, which have values behind a launch. The recording reads
        and writes the memory of ``tensors``, which it does not keep. Raises the error of ``run``.
        """
        ...

    def turn(self) -> AbstractContextManager[None]:
        """Return a context in which the memory of recordings is the caller's; others wait."""
        ...


class Cuda:
    """The recorder of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._lock = device, threading.RLock()
        self._stream, self._done = torch.cuda.Stream(device), torch.cuda.Event()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def is_recording(self) -> bool:
        """Return True while the current stream is recorded."""
        return torch.cuda.is_current_stream_capturing()

    def warm_up(self, run: Callable[[], R]) -> R:
        """Return ``run()``, computed on the stream on which it will be recorded."""
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = run()
        here.wait_stream(self._stream)
        return result

    def record(
        self, run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], nbytes: int
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Record ``run(*tensors)`` as a CUDA graph (see :class:`Recorder`)."""
        graph, failed, results = torch.cuda.CUDAGraph(), list[Exception](), list[Sequence[Tensor]]()
        # A pool is freed with the last of its graphs, and its handle cannot be used again.
        pool = next((other.pool() for other in self._graphs), None) or torch.cuda.graph_pool_handle()
        try:
            # The stream is restored if the end fails. A recording fails if an older one is freed by the collector.
            with self.turn(), torch.cuda.stream(torch.cuda.current_stream(self.device)), uncollected():
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                        results.append(run(*tensors))
                    except Exception as error:  # hidden otherwise by that of the end, which it causes
                        failed.append(error)
        except RuntimeError as error:
            failed.append(error)
        if failed:
            raise failed[0]
        self._graphs.add(graph)
        return graph.replay, results[0]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the current stream wait for the turn before this, whose memory it takes over."""
        with self._lock, torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)


_RECORDERS: dict[torch.device, Recorder] = {}


def recorder_of(device: torch.device) -> Recorder | None:
    """Return the recorder of a device, one for the process; None for a device that cannot record."""
    if device not in _RECORDERS and device.type == "cuda":
        _RECORDERS[device] = Cuda(device)
    return _RECORDERS.get(device)
