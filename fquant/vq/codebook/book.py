"""A codebook with its running averages, and the lookup of its codes.

    book  = init(key, num_codes=1024, dim=64)
    x     = decode(book, codes)                  # i64[...] to f32[... 64]

The invariants of a Book of K codes of D numbers:

* ``codes`` f32[K D] move by ``ema``, by ``expire``, or by gradients if the book is ``learnable``. Rows are compared
  with ``code_vectors(book)``: the codes, of unit length if the metric is cosine, mapped if the book is affine.
* ``counts`` f32[K] and ``sums`` f32[K D] are running means of the number and the sum of the rows of each code. They
  start at one and at the codes (van den Oord et al. 2017, appendix A.1; the start is that of vector-quantize-pytorch).
* State is float32 for rows of any dtype. A book that is not learnable is a constant to every transform.
* With ``heads`` all three have a first dim h, and head i of rows [... h D] has codes of its own. Heads that share
  codes are rows [... h D] of a book without heads.
* Code -1 stands for no code, of a row that is masked, dropped, or not finite. It decodes to zeros.

An affine book compares rows with (c - mean of codes) · sd of rows / sd of codes + mean of rows. It is for encoders that
move fast (Huh et al. 2023, "Straightening out the straight-through estimator"). In training only, its averages move
before the step, as in vector-quantize-pytorch, or after: ``shift(book, shard.psum(moments(book, x), mesh, axes))``.
"""

import math
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import random, tree
from ...kernels import dispatch
from ..quantized import Mask, Seed
from . import rows

Metric = Literal["euclidean", "cosine"]
MIN_VARIANCE = 1e-5  # of a dim of rows or codes


@tree.node
class Affine:
    """Running means and variances f32[D] or [h D] of rows and codes; ``seen`` f32[] is zero before the first rows."""

    row_mean: Tensor
    row_var: Tensor
    code_mean: Tensor
    code_var: Tensor
    seen: Tensor


@tree.node
class Moments:
    """Sums over rows, in float64, so that a mean far from zero leaves digits to the variance."""

    number: Tensor  # f64[] or [h 1]
    sum: Tensor  # f64[D] or [h D]
    square: Tensor  # f64[D] or [h D]


@tree.node
class Book:
    """A codebook; the module's docstring lists its invariants."""

    codes: Tensor
    counts: Tensor
    sums: Tensor
    metric: Metric = tree.static(default="euclidean")
    learnable: bool = tree.static(default=False)
    affine: Affine | None = None


def init(
    key: Seed,
    num_codes: int,
    dim: int,
    *,
    heads: int | None = None,
    metric: Metric = "euclidean",
    learnable: bool = False,
    affine: bool = False,
) -> Book:
    """Create a book of random codes, uniform within ±sqrt(6 / (num_codes·dim)) as torch's ``kaiming_uniform_``.

    * heads: number of books side by side; None is one book, without that dim.
    * metric: euclidean, or cosine: codes, and rows before they are compared, have unit length.
    * learnable: codes are parameters: gradients reach them, and ``ema`` refuses them.
    * affine: codes are mapped to the mean and variance of rows once ``shift`` has seen some; not with cosine.

    Raises ValueError for sizes below 1, an unknown metric, and affine with cosine.
    """
    for name, size in (("num_codes", num_codes), ("dim", dim), ("heads", 1 if heads is None else heads)):
        if size < 1:
            raise ValueError(f"{name} is {size}; wanted at least 1")
    if metric not in get_args(Metric):
        raise ValueError(f"metric is {metric!r}; wanted one of {', '.join(get_args(Metric))}")
    if affine and metric == "cosine":
        raise ValueError("affine is True with metric 'cosine', whose codes have unit length; use metric='euclidean'")
    lead = () if heads is None else (heads,)
    codes = math.sqrt(6 / (num_codes * dim)) * (2 * random.uniform(random.key(key), (*lead, num_codes, dim)) - 1)
    codes = rows.unit(codes) if metric == "cosine" else codes
    averages = None
    if affine:
        zero, one = (make(*lead, dim) for make in (codes.new_zeros, codes.new_ones))
        averages = Affine(zero, one, zero.clone(), one.clone(), codes.new_zeros(()))
    return Book(codes, codes.new_ones(codes.shape[:-1]), codes.clone(), metric, learnable, averages)


def constant(codes: Tensor, metric: Metric = "euclidean") -> Book:
    """Return a book of ``codes`` f[K D] or [h K D] for a search or a lookup, with counts of one."""
    return Book(codes, torch.ones_like(codes[..., 0]), codes, metric)


def restart(book: Book, codes: Tensor) -> Book:
    """Set the codes of ``book`` to ``codes`` f[K D] or [h K D], its counts to one and its sums to the codes.

    With the old sums, the next average would restore the old codes. Raises ValueError for another shape.
    """
    if codes.shape != book.codes.shape:
        raise ValueError(f"codes: got shape {tuple(codes.shape)}; wanted {tuple(book.codes.shape)}, as the book's")
    codes = codes.detach().to(book.codes.dtype)
    codes = rows.unit(codes) if book.metric == "cosine" else codes.clone()
    return replace(book, codes=codes, counts=torch.ones_like(book.counts), sums=codes.clone())


def code_vectors(book: Book) -> Tensor:
    """Return the vectors that rows are compared with and decode to, f32[K D] or [h K D]."""
    codes = book.codes if book.learnable else book.codes.detach()
    if book.metric == "cosine":
        return rows.unit(codes) if book.learnable else codes  # ema keeps them of unit length
    if book.affine is None:
        return codes
    affine, ratio = book.affine, _std_ratio(book.affine)
    return (codes - affine.code_mean[..., None, :]) * ratio[..., None, :] + affine.row_mean[..., None, :]


def vectors_by_head(book: Book) -> Tensor:
    """Return :func:`code_vectors` as [h K D], with h = 1 without heads."""
    codes = code_vectors(book)
    return codes if codes.ndim == 3 else codes[None]


def as_codes(book: Book, x: Tensor) -> Tensor:
    """Map rows ``x`` [h n D] to the codes whose vectors they are."""
    if book.affine is None:
        return rows.unit(x) if book.metric == "cosine" else x
    parts = (book.affine.row_mean, _std_ratio(book.affine), book.affine.code_mean)
    mean, ratio, code_mean = (part.to(x.dtype).reshape(-1, 1, x.shape[-1]) for part in parts)
    return (x - mean) / ratio + code_mean


def moments(book: Book, x: Tensor, mask: Mask = None) -> Moments:
    """Return the moments of rows ``x`` f[... D]: the finite ones that ``mask`` selects."""
    rows.check(book, x)
    flat = rows.flatten_heads(book, x.detach().double(), 1)
    flat, valid = rows.zero_invalid(flat, rows.flat_mask(book, mask, x))
    number, total, square = valid.sum(1, dtype=flat.dtype)[:, None], flat.sum(1), flat.square().sum(1)
    return Moments(*((number, total, square) if book.codes.ndim == 3 else (number[0, 0], total[0], square[0])))


def shift(book: Book, moments: Moments, row_decay: float = 0.99, code_decay: float = 0.9) -> Book:
    """Move the averages of ``book`` towards the moments of its codes and rows; the first call with rows sets them."""
    if book.affine is None:
        raise ValueError("the book is not affine; make one with init(..., affine=True)")
    for name, decay in (("row_decay", row_decay), ("code_decay", code_decay)):
        if not 0 <= decay < 1:
            raise ValueError(f"{name} is {decay}; wanted 0 <= {name} < 1")
    old, codes = book.affine, book.codes.detach()
    number = moments.number.clamp(min=1)
    mean = moments.sum / number
    var = (moments.square / number - mean.square()).clamp(min=0)
    any_rows = (moments.number > 0).any()

    def average(old_value: Tensor, value: Tensor, decay: float) -> Tensor:
        value = value.to(old_value.dtype)
        moved = torch.where(old.seen > 0, old_value * decay + value * (1 - decay), value)
        return torch.where(any_rows, moved, old_value)

    new = Affine(
        average(old.row_mean, mean, row_decay),
        average(old.row_var, var, row_decay),
        average(old.code_mean, codes.mean(-2), code_decay),
        average(old.code_var, codes.var(-2, correction=0), code_decay),
        torch.where(any_rows, torch.ones_like(old.seen), old.seen),
    )
    return replace(book, affine=new)


def decode(book: Book, codes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Look up ``codes`` i64[...], with heads [... h]: [... D] in ``dtype``, or the book's; zeros for -1.

    Raises TypeError for another dtype, IndexError for codes beyond the book: in a transform or a capture when it runs.
    """
    num_codes, dim = book.codes.shape[-2:]
    check_lookup(book, codes, num_codes)
    table = code_vectors(book).reshape(-1, dim)
    # A code beyond the book must fail in the lookup, and not find a code of the next head.
    beyond = torch.where(codes == -1, 0, len(table))
    first = torch.arange(len(book.codes), device=codes.device) * num_codes if book.codes.ndim == 3 else 0
    index = torch.where((codes >= 0) & (codes < num_codes), codes + first, beyond)
    return torch.where((codes == -1)[..., None], 0.0, F.embedding(index, table)).to(dtype or table.dtype)


def check_lookup(book: Book, codes: Tensor, num_codes: int) -> None:
    """Check that ``codes`` are i64 (TypeError), [... h] with heads (ValueError), and of a book of ``num_codes``."""
    if not isinstance(codes, Tensor) or codes.dtype is not torch.int64:
        got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"codes: got {got}; wanted int64, as from encode")
    if book.codes.ndim == 3 and codes.shape[-1:] != book.codes.shape[:1]:
        heads = len(book.codes)
        raise ValueError(f"codes: got shape {tuple(codes.shape)}; wanted [... {heads}], a code for each of the heads")
    check_codes(codes, num_codes)


def check_row_codes(book: Book, codes: Tensor, x: Tensor) -> None:
    """Check that ``codes`` are one i64 for each row of ``x`` (ValueError), and codes of the book (IndexError)."""
    if codes.dtype is not torch.int64 or codes.shape != x.shape[:-1]:
        got = f"{codes.dtype} {tuple(codes.shape)} for x {tuple(x.shape)}"
        raise ValueError(f"codes: got {got}; wanted int64, one for each row")
    check_codes(codes, book.codes.shape[-2])


def check_codes(codes: Tensor, num_codes: int) -> None:
    """Raise IndexError for codes beyond a book of ``num_codes``, where values can be seen."""
    if dispatch.is_direct(codes) and codes.numel():
        least, most = (int(t) for t in codes.aminmax())
        if least < -1 or most >= num_codes:
            got = f"{least if least < -1 else most} for a book of {num_codes}"
            raise IndexError(f"codes: got {got}; wanted 0 to {num_codes - 1}, or -1 for none")


def _std_ratio(affine: Affine) -> Tensor:
    return affine.row_var.clamp(min=MIN_VARIANCE).sqrt() / affine.code_var.clamp(min=MIN_VARIANCE).sqrt()
