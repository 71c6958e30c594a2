"""Files of trees, a leaf at a time: :func:`save` reads each Lazy of a tree once, :func:`lazy` opens it again.

    lazy_tree.save("packed.safetensors", tree.map_at(r"layers\\..*", partial(quantize, format=NF4_DQ), params))
    params = lazy_tree.lazy("packed.safetensors")          # every leaf a Lazy that reads a tensor or a Packed

The file is the one of ``fquant.io.safetensors.save``, byte for byte, and each reader reads both. Its layout follows
from the ``like`` of each leaf. So all buffers of a Packed are put in their places as soon as it is made: a source is
read and quantised once, and memory is that of the largest leaf. An interrupted call can be continued.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..device import HOST
from ..kernels.spec import Spec, check
from ..lazy import Lazy
from ..lazy import like as like_of
from ..packed import Packed, buffers
from ..tree import expect
from . import safetensors, tree_json
from .files import digests
from .partial import continued

SAMPLE = 4  # leaves of an interrupted file that are compared, at least

_is_leaf = lambda x: isinstance(x, Packed | Lazy)
_join = lambda path, name: f"{path}.{name}" if path and name else path or name


def save(path: str | Path, params: Any, done: Callable[[str], None] = lambda path: None, resume: bool = False) -> None:
    """Write the tree ``params``; leaves are tensors, Packed or Lazy of these. ``done(path)`` is called after each leaf.

    The file gets its name when it is whole (see ``fquant.io.partial``). With ``resume`` the leaves of an interrupted
    call are kept, once a few of them are compared. Raises the errors of ``fquant.io.safetensors.save``, and ValueError
    for a Lazy that does not read its ``like``. Raises ValueError for an interrupted file without ``resume``, and for
    one of something else.
    """
    text, likes = tree_json.encode(like_of(params))
    leaves = tree.items(params, is_leaf=_is_leaf)
    with tree.at(str(path)):
        for name, like in likes.items():
            safetensors.check_writable(name, like, may_be_meta=True)
        head, starts = safetensors.layout(likes, {"format": "pt", safetensors.TREE: text})
        places = digests.places(head, {name: likes[name].nbytes for name in starts})
        with continued(path, head, [at for at, _ in leaves], resume) as part:
            kept = [item for item in leaves if item[0] in part.finished]
            for at, leaf in kept[:: max(1, len(kept) // SAMPLE)]:
                for name, t in _buffers(at, leaf, likes):
                    part.file.seek(starts[name])
                    same = part.file.read(t.nbytes) == safetensors.bytes_of(t)
                    expect(same, f"{name}: got other values than those of an interrupted run; remove its file")
            for at, leaf in leaves:
                if at not in part.finished:
                    nbytes = 0
                    for name, t in _buffers(at, leaf, likes):
                        part.file.seek(starts[name])
                        digest = digests.write(part.file, safetensors.bytes_of(t))
                        part.file.seek(places[name])
                        part.file.write(digest)
                        nbytes += t.nbytes
                    part.finish(at, nbytes)
                done(at)
            digests.seal(part.file, len(head))


def _buffers(at: str, leaf: Any, likes: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Read a leaf; return its tensors by name, if they are as announced."""
    with tree.at(at):
        content = leaf.read() if isinstance(leaf, Lazy) else leaf
    out = [(_join(at, name), t) for name, t in tree.items(content)]
    for name, t in out:
        expect(name in likes, f"{name}: got a buffer that its like lacks, wanted none; correct the like")
        safetensors.check_like(name, t, likes[name])
    return out


def lazy(path: str | Path, device: torch.device = HOST) -> Any:
    """Return the tree of a file with a Lazy for each tensor or Packed, that reads to ``device``; read its header alone.

    Raises ValueError for a file that holds no tree, and, with the path, for a Packed whose buffers contradict its
    shape.
    """
    found = safetensors.tree_header(path)

    def meta(name: str) -> Tensor:
        entry = found.tensors[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def leaf(at: str, like: Any) -> Lazy:
        if isinstance(like, Packed):
            try:
                check(Spec(like.format, like.shape, like.dtype), buffers(like))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}: {error}; write the file again") from None
        read = lambda: tree.map_with_path(lambda name, _: safetensors.read(found, _join(at, name), device=device), like)
        stamp = lambda: " ".join(safetensors.stamp(found, _join(at, name)) for name in tree.paths(like))
        return Lazy(read, like, stamp, device=device)

    return tree.map_with_path(leaf, tree_json.decode(found.metadata[safetensors.TREE], meta), is_leaf=_is_leaf)
