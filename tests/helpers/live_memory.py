"""Which memory a computation leaves behind: every storage made inside, that is still alive, wherever it is held.

torch.func forbids saved-tensor hooks, and what autograd saves has no Python object to find, so storages are watched.
"""

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fquant import tree


class Live(TorchDispatchMode):
    """``with Live() as live: ...`` and then ``live.sizes()``, the bytes of each storage still alive, largest first."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {_storage(t)._cdata for t in tree.leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree.leaves(out):
            if isinstance(t, torch.Tensor) and _storage(t)._cdata not in known:
                self.made[_storage(t)._cdata] = (StorageWeakRef(_storage(t)), _storage(t).nbytes())
        return out

    def sizes(self) -> list[int]:
        gc.collect()
        return sorted((size for ref, size in self.made.values() if not ref.expired()), reverse=True)


class Peak(Live):
    """The most bytes that were alive at once of all that was made inside: ``most``."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.made = {storage: (ref, size) for storage, (ref, size) in self.made.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self.made.values()))
        return out


def _storage(t: torch.Tensor) -> torch.UntypedStorage:
    return t.untyped_storage()
