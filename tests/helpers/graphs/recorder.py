"""A recorder on the host with the strict semantics of CUDA graphs, for tests without a card.

*Recording* runs the step once under a mode that keeps every call with its tensors. Arguments are memory at an address,
which is not kept alive. Behind that, arguments have their old bytes again and results have none, because a capture of
CUDA computes nothing. A *replay* repeats the calls: each result is copied to the tensor of the recording. First it
poisons the results of all recordings of the pool, because a replay overwrites what earlier ones returned.
"""

import contextlib
import ctypes
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fquant import tree
from fquant.compile.cuda_graph import recorder as recorders

POISON = 0xC5  # a large negative number in floats, no index in integers


def tensors_of(x):
    return [leaf for leaf in tree.leaves(x) if isinstance(leaf, torch.Tensor)]


def key(t):
    return t.untyped_storage()._cdata


class _Calls(TorchDispatchMode):
    """The calls below torch's dispatcher: op, arguments, results, and those results that are new memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {key(t) for t in tensors_of((args, kwargs))}
        new = [i for i, t in enumerate(tensors_of(out)) if key(t) not in given]
        if new or func._schema.is_mutable:
            self.calls.append((func, args, kwargs, out, new))
        return out


class HostRecorder:
    """Record and replay on the host; ``recorded``, ``replayed`` and ``warmed`` count."""

    def __init__(self):
        self.recorded = self.replayed = self.warmed = 0
        self.nbytes, self.pool, self.recording, self.turns = [], [], False, 0
        self.lock = threading.RLock()

    def is_recording(self):
        return self.recording

    def warm_up(self, run):
        self.warmed += 1
        return run()

    @contextlib.contextmanager
    def turn(self):
        with self.lock:
            self.turns += 1
            yield
            self.turns -= 1

    def record(self, run, tensors, nbytes):
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        before = [(at_address(t), bytes_of(t).clone()) for t in tensors]
        self.recording = True
        try:
            with torch.compiler.set_stance("force_eager"), _Calls() as seen:  # no compiler takes the mode
                results = run(*map(at_address, tensors))
        finally:
            self.recording = False
            for t, raw in before:
                bytes_of(t).copy_(raw)
        self.recorded += 1
        self.nbytes.append(nbytes)
        fresh = [tensors_of(out)[i] for *_, out, new in seen.calls for i in new]
        self.pool += fresh
        self.poison()

        def replay():
            assert self.turns, "a replay outside of a turn"
            self.replayed += 1
            self.poison()
            for func, args, kwargs, out, new in seen.calls:
                again, kept = tensors_of(func(*args, **kwargs)), tensors_of(out)
                for i in new:
                    kept[i].copy_(again[i])

        return replay, results

    def poison(self):
        for t in self.pool:
            bytes_of(t).fill_(POISON)


def at_address(t):
    """Return a tensor in the memory of ``t`` that does not keep it alive."""
    storage = t.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    return torch.empty(0, dtype=t.dtype).set_(raw.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def bytes_of(t):
    """Return all bytes of the storage of ``t``."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


def use(monkeypatch):
    """Let jit record on the host; return the recorder."""
    made = HostRecorder()
    monkeypatch.setitem(recorders._RECORDERS, torch.device("cpu"), made)
    return made
