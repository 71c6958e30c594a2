"""A recorder on the host with the strict semantics of CUDA graphs, for tests without a card.

*Recording* runs the step once under a mode that keeps every call with its tensors. Arguments are memory at an address,
which is not kept alive. Behind that, arguments have their old bytes again and results have none, because a capture of
CUDA computes nothing. A *replay* repeats the calls: each result is copied to the tensor of the recording. First it
poisons the results of all recordings of the pool, because a replay overwrites what earlier ones returned.

Transfers and collectives run beside other calls, up to their wait. So a result has its values only from the wait on,
and is poison before. What is sent must be the same at the issue and at the wait.

``whole`` repeats a step as one call, of which the mode sees nothing, such as a kernel of Inductor.
"""

import contextlib
import ctypes
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fquant import tree
from fquant.compile import graph as graphs
from fquant.compile.cuda_graph import recorder as recorders

POISON = 0xC5  # a large negative number in floats, no index in integers
WAITS = (graphs._WAIT, graphs._ARRIVED)


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
        if new or func._schema.is_mutable or str(func) in WAITS:
            self.calls.append((func, args, kwargs, out, new))
        return out


class HostRecorder:
    """Record and replay on the host; ``recorded``, ``replayed``, ``warmed`` and ``waited`` count."""

    def __init__(self, whole=False):
        self.recorded = self.replayed = self.warmed = self.waited = 0
        self.nbytes, self.pool, self.recording, self.turns = [], [], False, 0
        self.lock, self.whole = threading.RLock(), whole

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
        before, given = [(at_address(t), bytes_of(t).clone()) for t in tensors], [*map(at_address, tensors)]
        self.recording = True
        try:
            if self.whole:
                results = run(*given)
                calls = [(run, given, {}, results, [i for i, t in enumerate(results) if not shares(t, given)])]
            else:
                with torch.compiler.set_stance("force_eager"), _Calls() as seen:  # no compiler takes the mode
                    results = run(*given)
                calls = seen.calls
        finally:
            self.recording = False
            for t, raw in before:
                bytes_of(t).copy_(raw)
        self.recorded += 1
        self.nbytes.append(nbytes)
        self.pool += [tensors_of(out)[i] for *_, out, new in calls for i in new]
        self.poison()

        def replay():
            assert self.turns, "a replay outside of a turn"
            self.replayed += 1
            self.poison()
            self.repeat(calls)

        return replay, results

    def repeat(self, calls):
        in_flight = {}
        for func, args, kwargs, out, new in calls:
            if is_issue(func):
                (result,), given = tensors_of(out), tensors_of((args, kwargs))
                in_flight[key(result)] = finished(func, func(*args, **kwargs)), [(t, raw_of(t)) for t in given]
            elif str(func) in WAITS:
                self.waited += 1
                value, given = in_flight.pop(key(args[0]))
                assert all(torch.equal(raw_of(t), raw) for t, raw in given), "what is sent was written before the wait"
                args[0].copy_(value)
            else:
                again, kept = tensors_of(func(*args, **kwargs)), tensors_of(out)
                for i in new:
                    kept[i].copy_(again[i])
        assert not in_flight, "a stream that is forked and never joined"

    def poison(self):
        for t in self.pool:
            bytes_of(t).fill_(POISON)


def is_issue(func):
    return str(func) in graphs._TRANSFERS or (graphs.issued(func) is not None and str(func) not in WAITS)


def finished(func, x):
    """Return the value of a transfer or collective."""
    transfer = str(func) in graphs._TRANSFERS
    return (torch.ops.fquant.arrived if transfer else torch.ops._c10d_functional.wait_tensor)(x).clone()


def shares(t, given):
    """Return True if ``t`` is in the memory of one of ``given``."""
    return t.untyped_storage().data_ptr() in {g.untyped_storage().data_ptr() for g in given}


def raw_of(t):
    """Return a copy of the bytes of a tensor's elements."""
    return t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


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


def use(monkeypatch, whole=False):
    """Let jit record on the host; return the recorder."""
    made = HostRecorder(whole)
    monkeypatch.setitem(recorders._RECORDERS, torch.device("cpu"), made)
    return made
