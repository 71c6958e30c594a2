"""The pieces of a decoder in plain tensor operations: packed documents, gates of MLPs, loss.

Every function takes any leading dims, as in ``[... t d]``, and every transform of torch.func. Numerics follow
transformers' eager Llama: softmax in float32 (float64 for float64 input), cast back to the stream's dtype.

*Packed documents.* A sequence may hold several documents, one after another: runs of equal ``segments``. A token sees
the tokens of its own document up to itself, and positions restart at every document.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant import tree
from fquant.autodiff import is_mapped, layers, mapped_levels
from fquant.communication import LOCAL, Comm, no_total
from fquant.device import HOST

from .reference_gradient import at_least_float32
from .swiglu import gated

IGNORE = -100  # a target that does not count, as everywhere in torch
swiglu = gated  # silu(gate) * up, both [... f]


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``gelu(gate) * up``, both [... f], by the approximation of GELU with tanh (Shazeer 2020)."""
    return F.gelu(gate, approximate="tanh") * up


def runs(tokens: Tensor, segments: Tensor) -> Tensor:
    """Number packed documents from 0 in their order: segments int ``[... t]`` -> int64 ``[... t]``.

    Raises ValueError for segments of another shape or device than the tokens'.
    """
    _check_like("segments", segments, "the tokens'", tokens.device, tokens.shape)
    return _starts(segments).cumsum(-1)


def positions(tokens: Tensor, runs: Tensor | None = None) -> Tensor:
    """Return each token's place in its document: int64 ``[t]``, or ``[... t]`` with the ``runs`` of :func:`runs`."""
    place = torch.arange(tokens.shape[-1], device=tokens.device)
    if runs is None:
        return place
    return place - torch.where(_starts(runs), place, 0).cummax(-1).values


def _starts(segments: Tensor) -> Tensor:
    """Mark the first token of every document but the first: bool ``[... t]``."""
    return F.pad(segments[..., 1:] != segments[..., :-1], (1, 0))


def cross_entropy(logits: Tensor, targets: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Sum the negative log likelihoods of the targets and divide by ``count``: a float32 scalar, in nats.

    logits ``[... t vocab]``; targets int64 or int32 ``[... t]``, of which -100 is ignored. ``count`` is the number of
    targets of the global batch. The default is the number counted here (at least 1), which is right only for one
    micro-batch on one process; on a mesh use ``decoder.loss``, or ``comm.total`` of the number. The loss of no targets
    is 0, where torch's mean is NaN. Raises the errors of :func:`check_ids` and :func:`check_range`. Raises ValueError
    without ``count`` in a job of several ranks.
    """
    check_ids("targets", targets, "the logits'", logits.device, logits.shape[:-1])
    check_range("targets", targets, logits.shape[-1], IGNORE)
    counted, wide = targets != IGNORE, at_least_float32(logits)
    chosen = wide.gather(-1, torch.where(counted, targets, 0)[..., None]).squeeze(-1)
    nll = torch.where(counted, wide.logsumexp(-1) - chosen, 0.0).sum()
    return nll / (count_here(targets) if count is None else count)


def count_here(targets: Tensor) -> Tensor:
    """Count the targets that are not ignored: i64[], at least 1. Raise ValueError in a job of several ranks."""
    return LOCAL.total((targets != IGNORE).sum()).clamp(min=1)


def num_targets(targets: Tensor, params: Any, comm: Comm) -> Tensor:
    """Count the targets of the whole batch that are not ignored, on all ranks: i64[], at least 1.

    A vmap over targets but not over ``params`` is one over examples, which no other rank has parts of.
    """
    count = (targets != IGNORE).sum()
    is_of_example = mapped_levels(targets).difference(*map(mapped_levels, tree.leaves(params)))
    if comm.total is no_total or not is_of_example:
        count = comm.total(count)
    return count.clamp(min=1)


def check_ids(name: str, ids: Tensor, owner: str, device: torch.device, shape: torch.Size) -> None:
    """Raise TypeError unless ``ids`` are int64 or int32, and ValueError for another shape or device than ``owner``."""
    _check_like(name, ids, owner, device, shape)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: {ids.dtype}, want int64 or int32; use {name}.long()")


def _check_like(name: str, t: Tensor, owner: str, device: torch.device, shape: torch.Size) -> None:
    if t.shape != shape:
        raise ValueError(f"{name}: shape {tuple(t.shape)}, want {owner} {tuple(shape)}; give one number for each token")
    if t.device != device:
        raise ValueError(f"{name}: on {t.device}, want {owner} device {device}; use {name}.to({str(device)!r})")


def check_range(name: str, ids: Tensor, size: int, ignore: int | None = None) -> None:
    """Raise IndexError unless all ``ids`` are in [0, size) or equal ``ignore``.

    Values are read in eager code on the CPU only: a capture, a vmap or a GPU leaves the check to the lookup itself.
    """
    if not _is_readable(ids):
        return
    wrong = (ids < 0) | (ids >= size)
    if ignore is not None:
        wrong = wrong & (ids != ignore)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        wanted = f"0 to {size - 1}" + ("" if ignore is None else f", or {ignore} to ignore it")
        raise IndexError(f"{name}: {int(ids[at])} at {list(at)}, want {wanted}; use the tokenizer of this model")


def _is_readable(t: Tensor) -> bool:
    """Return True if the values of ``t`` can be read at no cost and without entering a graph."""
    if t.device != HOST or torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return not is_mapped(t) and type([*layers(t)][-1]) is Tensor
