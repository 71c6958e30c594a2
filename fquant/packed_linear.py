"""linear and embedding: products and lookups for every kind of weight.

    y = linear(x, w)            # x f[... in], w [out in]  ->  f[... out], computed in x's dtype
    y = embedding(tokens, w)    # tokens i[...], w [vocab dim]  ->  f[... dim]

A packed weight is a constant: gradients pass through it to ``x`` and never to it. One autograd Function computes
``x · Wᵀ`` and, transposed, its dual ``g · W``, each by one op of ``fquant.kernels``. It saves the packed buffers for
the backward, so a dense weight never exists. Its backward and its jvp are the Function itself, at every order.
"""

import math
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import random
from .adapted import merge_aware
from .adapted import slots as slot_products
from .adapted.dora import gain, row_norms, unwound
from .adapted.merge_aware import StraightThrough
from .adapted.nodes import Adapted, AdaptedSlots, Lora, Scaled, scaling
from .calibration import statistics
from .calibration.statistics import Probed
from .communication import LookedUpRows, wanted_weights
from .device import HOST
from .dynamic_quantization import Activations, Outliers, fake_quantize, separate
from .format import Format
from .kernels import dispatch, packed_ops
from .kernels.integer_ops import is_integer
from .kernels.ops import decoding
from .kernels.spec import SLOTS, Spec
from .packed import Packed, buffers, dequantize, take_rows
from .packed_product import Product, matmul
from .quantized_training import weights
from .quantized_training.products import product
from .quantized_training.recipes import FakeQuantization, Products, Trainable
from .quantized_training.weights import Carried

FEW_ROWS, LARGE = 4, 1 << 20  # rows, and elements of a dense weight, from which its one read takes the time

Weight: TypeAlias = Tensor | Packed | Adapted | AdaptedSlots | Scaled | StraightThrough | Trainable | Carried | Probed


def linear(x: Tensor, w: Weight, bias: Tensor | None = None, act: Activations | None = None) -> Tensor:
    """Return ``x · Wᵀ + bias``, f[... out] in x's dtype, for x f[... in], w [out in] and bias f[out].

    With ``act``, a format or :class:`Outliers`, x is quantised first, and derivatives are straight-through
    (``dynamic_quantization``); an adapter still gets x as it is.

    The weight is cast to x's dtype. An adapter's product is computed in the adapter's dtype. Raises TypeError for
    another kind of weight, ValueError where the sizes do not fit.
    """
    if act is not None:
        y = _with_act(x, w, act)
        return y if bias is None else _with_bias(y, bias)
    match w:
        case Packed():
            _check(x, w.shape)
            inputs = buffers(w)
            if x.ndim == 2 and dispatch.is_direct(x, *inputs):  # because dispatch takes as long as the product of a row
                y = packed_ops.product("matmul", x, inputs, Spec(w.format, w.shape, w.dtype))
            else:
                y = _packed(x, w)
        case Tensor():
            _check(x, tuple(w.shape))
            y = _few_rows(x, w) if _has_few_rows(x, w) else x @ w.to(x.dtype).mT
        case Adapted(merge_aware=False):
            y = _adapted(x, w)
        case AdaptedSlots():
            y = _with_slots(x, w)
        case Adapted() | StraightThrough():
            found = merged(w)
            _check(x, tuple(found.merged.shape))
            y = merge_aware.linear(x, found)
        case Scaled(base=base, ia3=ia3):
            return scaled_outputs(linear(scaled(x, ia3.inputs), base, bias), w)
        case Probed(weight=weight, probe=probe):
            y = linear(x, weight) + statistics.linear(x, probe)
        case Carried(packed=packed):
            y = linear(x, packed) + weights.linear(x, w)
        case Trainable(weight=Tensor() as dense, recipe=Products() as recipe):
            _check(x, tuple(dense.shape))
            y = product(x, dense, recipe)
        case Trainable(weight=dense, recipe=FakeQuantization() as recipe):
            y = linear(x, _fake(dense, recipe), act=recipe.act)
        case _:
            raise wanted_weights("linear", w)
    return y if bias is None else _with_bias(y, bias)


def embedding(tokens: Tensor, w: Weight | LookedUpRows) -> Tensor:
    """Look up rows f[... dim] of ``w`` [vocab dim] by ``tokens`` i[...]; decode these rows only.

    Raises TypeError for another kind of weight or of tokens, and ValueError for a flat weight or one that is not
    [vocab dim]. Raises IndexError for a token beyond the vocabulary on CPUs, outside of transforms and captures.
    """
    match w:
        case Tensor():
            _check_tokens(tokens, tuple(w.shape))
            return F.embedding(tokens, w)
        case Packed():
            _check_tokens(tokens, w.shape)
            if w.format.flat:
                raise ValueError(f"{w.format.name}'s blocks straddle rows, so no row can be read; dequantize it first")
            return dequantize(take_rows(w, tokens.reshape(tokens.numel()))).reshape(*tokens.shape, w.shape[1])
        case LookedUpRows(table=table):
            return embedding(torch.arange(tokens.numel(), device=tokens.device).reshape(tokens.shape), table)
        case Trainable(weight=dense, recipe=recipe):
            return embedding(tokens, _fake(dense, recipe) if isinstance(recipe, FakeQuantization) else dense)
        case Adapted(base=base, lora=lora, merge_aware=True):
            return _merge_aware_rows(tokens, base, lora)
        case Adapted():
            return _adapted_rows(tokens, w)
        case _:
            raise wanted_weights("embedding", w)


def merged(w: Adapted | StraightThrough, like: Any = None) -> StraightThrough:
    """Merge a merge-aware weight; one that is merged already is returned.

    If ``like`` is the merge of an equal weight, it is not merged again; only gradients go to this adapter.
    """
    if isinstance(w, StraightThrough):
        return w
    if isinstance(like, StraightThrough):
        return replace(like, a=w.lora.a, b=scaling(w.lora) * w.lora.b)
    return merge_aware.straight_through(w.base, w.lora, scaling(w.lora))


def scaled(x: Tensor, factors: Tensor | None) -> Tensor:
    """Return ``x * factors`` in x's dtype, rounded once; ``x`` if there are no factors."""
    return x if factors is None else (x * factors).to(x.dtype)


def scaled_outputs(y: Tensor, w: Weight) -> Tensor:
    """Apply what multiplies the outputs f[... out] of ``w``, to a product or to a bias that is added elsewhere."""
    return scaled(y, w.ia3.outputs) if isinstance(w, Scaled) else y


def _merge_aware_rows(tokens: Tensor, base: Any, lora: Lora) -> Tensor:
    """Look up rows of the merged table."""
    if isinstance(base, LookedUpRows):  # whose rows are those of the tokens, in their order
        base, lora = base.table, replace(lora, b=lora.b[tokens.reshape(tokens.numel())])
        base = replace(base, shape=(tokens.numel(), *base.shape[1:])) if isinstance(base, Packed) else base
        tokens = torch.arange(tokens.numel(), device=tokens.device).reshape(tokens.shape)
    w = merged(Adapted(base, lora))
    return merge_aware.passed(embedding(tokens, w.merged), lambda a, b: F.embedding(tokens, b) @ a, w.a, w.b)


def _with_bias(y: Tensor, bias: Tensor) -> Tensor:
    if bias.shape != y.shape[-1:]:
        raise ValueError(f"linear got a bias {tuple(bias.shape)}; wanted {(y.shape[-1],)}, the rows of the weight")
    return y + bias.to(y.dtype)


def _fake(w: Any, recipe: FakeQuantization) -> Any:
    """Return the weight as it will be quantised; a packed one is already."""
    return w if recipe.weight is None or isinstance(w, Packed) else fake_quantize(w, recipe.weight)


def _packed(x: Tensor, w: Packed, act: str = "") -> Tensor:
    inputs, product = buffers(w), Product(Spec(w.format, w.shape, w.dtype), act=act)
    if (n := len(inputs)) > SLOTS:
        raise ValueError(f"linear got a weight of {n} buffers; wanted at most {SLOTS}, nest scales less")
    return matmul(x, product, *inputs, *[None] * (SLOTS - n))


def _with_act(x: Tensor, w: Weight, act: Activations) -> Tensor:
    """Return the product of quantised x."""
    if isinstance(w, Scaled):
        return scaled_outputs(linear(scaled(x, w.ia3.inputs), w.base, act=act), w)
    if isinstance(w, StraightThrough) or (isinstance(w, Adapted) and w.merge_aware):
        raise TypeError("linear got act beside a merge-aware weight; attach the adapter without merge_aware")
    if isinstance(w, Trainable):
        raise TypeError("linear got act beside a Trainable; name the format of x in its recipe")
    if isinstance(w, Adapted):
        return _adapted(x, w, act)
    if isinstance(w, AdaptedSlots):
        return _with_slots(x, w, act)
    if isinstance(act, Outliers):
        usual, large = separate(x, act)
        return linear(usual, w, act=act.format) + linear(large, w)
    if not isinstance(act, Format):
        raise TypeError(f"linear got act of type {type(act).__name__}; wanted a Format or Outliers")
    if isinstance(w, Packed) and is_integer(act, rows=True) and is_integer(w.format):
        _check(x, w.shape)
        return _packed(x, w, act.text)
    return linear(fake_quantize(x, act), w)


def _adapted(x: Tensor, w: Adapted, act: Activations | None = None) -> Tensor:
    root, nodes = unwound(w)
    y = linear(x, root, act=act)
    for node in nodes:
        lora = node.lora
        dropped = x if node.key is None else random.dropout(x, lora.dropout, node.key)
        low = linear(dropped.to(lora.a.dtype), lora.a)
        update = linear(scaling(lora) * low, lora.b).to(y.dtype)  # scaled where it is smallest
        if lora.magnitude is None:
            y = y + update
            continue
        factors = gain(lora.magnitude, row_norms(root, lora))  # f[out]
        if dropped is x:
            y = (factors * (y + update)).to(y.dtype)
        else:
            y = (y + (factors - 1) * linear(dropped, root, act=act) + factors * update).to(y.dtype)
    return y


def _adapted_rows(tokens: Tensor, w: Adapted) -> Tensor:
    """Look up rows of a table and of its adapters."""
    root, nodes = unwound(w)
    y = base = embedding(tokens, root)
    for lora in (node.lora for node in nodes):
        b = F.embedding(tokens, lora.b)
        y = y + (scaling(lora) * (b @ lora.a)).to(y.dtype)
        if lora.magnitude is not None:
            flat = lambda t: t.reshape(tokens.numel(), t.shape[-1])
            norms = row_norms(flat(base), replace(lora, b=flat(b)))
            y = (gain(lora.magnitude[tokens], norms.reshape(tokens.shape))[..., None] * y).to(y.dtype)
    return y


def _with_slots(x: Tensor, w: AdaptedSlots, act: Activations | None = None) -> Tensor:
    y = linear(x, w.base, act=act)
    return y + slot_products.updates(x, w.slots, w.key).to(y.dtype)


def _has_few_rows(x: Tensor, w: Tensor) -> bool:
    """Return True for few rows and a large weight on a CPU without derivatives, for which torch is slow."""
    rows = math.prod(x.shape[:-1])
    if not (0 < rows <= FEW_ROWS and w.numel() >= LARGE and x.dtype is w.dtype and x.device == HOST):
        return False
    recorded = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    return not (recorded or _is_transformed()) and w.shape[1] % 64 == 0


def _few_rows(x: Tensor, w: Tensor) -> Tensor:
    return decoding.dense_matmul(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w).reshape(*x.shape[:-1], len(w))


def _is_transformed() -> bool:
    """Return True inside a transform of torch.func, forward-mode differentiation, or torch.compile."""
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return forward_ad._current_level >= 0


def _check_tokens(tokens: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"embedding got tokens of {got}; wanted int64 or int32, use tokens.long()")
    if len(shape) != 2:
        raise ValueError(f"embedding got a weight of shape {shape}; wanted [vocab dim]")
    if tokens.device == HOST and dispatch.is_direct(tokens) and tokens.numel():
        least, most = (int(t) for t in tokens.aminmax())
        wrong = least if least < 0 else most
        if not 0 <= wrong < shape[0]:
            raise IndexError(f"embedding got token {wrong}; wanted 0 to {shape[0] - 1}, check the tokenizer")


def _check(x: Tensor, shape: tuple[int, ...]) -> None:
    if len(shape) != 2:
        raise ValueError(f"linear got a weight of shape {shape}; wanted [out in]")
    if not x.is_floating_point():
        raise TypeError(f"linear got x of {x.dtype}; wanted a float")
    if x.ndim == 0 or x.shape[-1] != shape[1]:
        raise ValueError(f"linear got x {tuple(x.shape)} and a weight {shape}; x's last dim must be {shape[1]}")
