"""Book: a codebook and what an exponential moving average of it needs, and what its codes stand for.

    book  = init(key, num_codes=1024, dim=64)
    x     = decode(book, codes)                  # i64[...] to f32[... 64]

The invariants of a Book of K codes of D numbers:

* ``codes`` f32[K D] are what moves: by ``ema``, by ``expire``, or by gradients if the book is ``learnable``. What rows
  are compared with is ``codebook(book)``: the same, of unit length if the metric is cosine, mapped if the book is
  affine.
* ``counts`` f32[K] and ``sums`` f32[K D] are running means of how many rows a code got and of their sum. They start at
  one and at the codes (van den Oord et al. 2017, appendix A.1; the start is that of vector-quantize-pytorch).
* State is float32 whatever the rows are.
* With ``heads`` all three have one more dim in front, [h K D], and head i of rows [... h D] has codes of its own. Heads
  that share a book are more rows of it: rows [... h D] of a book without heads.
* Code -1 stands for no code: of a row that is masked, dropped, or not finite. It decodes to zeros.
* A book that is not learnable is a constant to every transform.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import random
from ...kernels import dispatch
from ...tree import node, static
from .rows import unit

Metric = Literal["euclidean", "cosine"]
METRICS = ("euclidean", "cosine")
FLAT = 1e-5  # variance below which a dim counts as having this one


@node
class Affine:
    """Running means and variances f32[D] (or [h D]) of rows and of codes; ``seen`` f32[] is zero until there are
    any."""

    row_mean: Tensor
    row_var: Tensor
    code_mean: Tensor
    code_var: Tensor
    seen: Tensor


@node
class Book:
    """A codebook; the module's docstring lists its invariants."""

    codes: Tensor
    counts: Tensor
    sums: Tensor
    metric: Metric = static(default="euclidean")
    learnable: bool = static(default=False)
    affine: Affine | None = None


def init(
    key: int | Tensor,
    num_codes: int,
    dim: int,
    *,
    heads: int | None = None,
    metric: Metric = "euclidean",
    learnable: bool = False,
    affine: bool = False,
) -> Book:
    """A book of random codes, uniform within ±sqrt(6 / (num_codes·dim)), as torch's ``kaiming_uniform_`` of [1 K D].

    heads      so many books beside each other; None is one book, without that dim
    metric     euclidean, or cosine: then codes have unit length, and so has every row before it is compared
    learnable  codes are parameters: gradients reach them, and ``ema`` refuses them
    affine     codes are compared after they have been given the mean and variance of rows (Huh et al. 2023), which
               ``shift`` follows; until its first call nothing is changed

    Raises ValueError for sizes below 1, an unknown metric, and affine with cosine, whose codes would not stay of unit
    length.
    """
    for name, size in (("num_codes", num_codes), ("dim", dim), ("heads", 1 if heads is None else heads)):
        if size < 1:
            raise ValueError(f"{name} is {size}; wanted at least 1")
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; wanted one of {', '.join(METRICS)}")
    if affine and metric == "cosine":
        raise ValueError("affine is True with metric 'cosine', whose codes have unit length; use metric='euclidean'")
    front = () if heads is None else (heads,)
    bound = math.sqrt(6 / (num_codes * dim))
    codes = bound * (2 * random.uniform(random.key(key), (*front, num_codes, dim)) - 1)
    if metric == "cosine":
        codes = unit(codes)
    start = None
    if affine:
        zero, one = (make(*front, dim) for make in (codes.new_zeros, codes.new_ones))
        start = Affine(zero, one, zero.clone(), one.clone(), codes.new_zeros(()))
    return Book(codes, codes.new_ones(codes.shape[:-1]), codes.clone(), metric, learnable, start)


def restart(book: Book, codes: Tensor) -> Book:
    """``book`` begun again at ``codes`` f[K D] (with heads [h K D]): with counts of one, and sums at them.

    With the sums that it had, the next average would put the codes back where they were. Codes of metric cosine are
    made of unit length; an affine book keeps its averages. Raises ValueError for another shape.
    """
    if codes.shape != book.codes.shape:
        raise ValueError(f"codes: got shape {tuple(codes.shape)}; wanted {tuple(book.codes.shape)}, as the book's")
    codes = codes.detach().to(book.codes.dtype)
    codes = unit(codes) if book.metric == "cosine" else codes.clone()
    return replace(book, codes=codes, counts=torch.ones_like(book.counts), sums=codes.clone())


def code_vectors(book: Book) -> Tensor:
    """The codes that rows are compared with and decode to, f32[K D] or [h K D]."""
    codes = book.codes if book.learnable else book.codes.detach()
    if book.metric == "cosine":
        return unit(codes) if book.learnable else codes  # those of an average are kept of unit length
    if book.affine is None:
        return codes
    of, ratio = book.affine, _ratio(book.affine)
    return (codes - of.code_mean[..., None, :]) * ratio[..., None, :] + of.row_mean[..., None, :]


def tables(book: Book) -> Tensor:
    """``codebook(book)`` as [h K D], h being 1 without heads."""
    codes = code_vectors(book)
    return codes if codes.ndim == 3 else codes[None]


def unmapped(book: Book, rows: Tensor) -> Tensor:
    """``rows`` [h n D] as the codes whose place in ``codebook(book)`` they are: the inverse of an affine book's map."""
    if book.affine is None:
        return rows
    parts = (book.affine.row_mean, _ratio(book.affine), book.affine.code_mean)
    mean, ratio, code_mean = (part.to(rows.dtype).reshape(-1, 1, rows.shape[-1]) for part in parts)
    return (rows - mean) / ratio + code_mean


def decode(book: Book, codes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What ``codes`` i64[...] (with heads [... h]) stand for, [... D] in ``dtype``, or the book's; zeros for -1.

    Raises TypeError for another dtype, IndexError for codes beyond the book: in a transform and in a capture, where
    values cannot be seen, when the lookup is run.
    """
    num_codes, dim = book.codes.shape[-2:]
    if not isinstance(codes, Tensor) or codes.dtype is not torch.int64:
        got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"codes: got {got}; wanted int64, as from encode")
    heads = book.codes.shape[0] if book.codes.ndim == 3 else None
    if heads is not None and codes.shape[-1:] != (heads,):
        raise ValueError(f"codes: got shape {tuple(codes.shape)}; wanted [... {heads}], a code for each of the heads")
    check_codes(num_codes, codes)
    table = code_vectors(book).reshape(-1, dim)
    # What is beyond is left to fail in the lookup, and must not be found among the codes of the next head.
    beyond = torch.where(codes == -1, 0, len(table))
    of_head = 0 if heads is None else torch.arange(heads, device=codes.device) * num_codes
    at = torch.where((codes >= 0) & (codes < num_codes), codes + of_head, beyond)
    return torch.where((codes == -1)[..., None], 0.0, F.embedding(at, table)).to(dtype or table.dtype)


def check_codes(num_codes: int, codes: Tensor) -> None:
    """Raise IndexError for codes that a book of so many does not have, where values can be seen."""
    if dispatch.is_direct(codes) and codes.numel():
        least, most = (int(t) for t in codes.aminmax())
        if least < -1 or most >= num_codes:
            wrong = least if least < -1 else most
            raise IndexError(
                f"codes: got {wrong} for a book of {num_codes}; wanted 0 to {num_codes - 1}, or -1 for none"
            )


def _ratio(of: Affine) -> Tensor:
    return of.row_var.clamp(min=FLAT).sqrt() / of.code_var.clamp(min=FLAT).sqrt()
