"""torch.func's grad, grad_and_value, vjp and jvp, with the differentiated leaves checked first.

torch.func says of an integer or absent leaf only that something must require gradients. These say which leaf, by path,
and what to do about it; otherwise they are torch.func's functions, and either may be used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from . import tree


def grad(f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """``torch.func.grad``; raises TypeError naming the path of a leaf that cannot be differentiated."""
    return _checked(torch.func.grad(f, argnums, has_aux), argnums)


def grad_and_value(
    f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """``torch.func.grad_and_value``; raises TypeError naming the path of a leaf that cannot be differentiated."""
    return _checked(torch.func.grad_and_value(f, argnums, has_aux), argnums)


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """``torch.func.vjp``; raises TypeError naming the path of a leaf that cannot be differentiated."""
    for i, primal in enumerate(primals):
        check(primal, f"argument {i}")
    return torch.func.vjp(f, *primals, has_aux=has_aux)


def jvp(f: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...], has_aux: bool = False) -> Any:
    """``torch.func.jvp``; raises TypeError naming the path of a leaf that cannot be differentiated."""
    for i, primal in enumerate(primals):
        check(primal, f"argument {i}")
    return torch.func.jvp(f, primals, tangents, has_aux=has_aux)


def check(x: Any, where: str = "") -> None:
    """Raise TypeError, naming the path, unless every leaf of ``x`` is a float tensor."""
    for path, leaf in tree.items(x):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            continue
        got = str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else type(leaf).__name__
        name = ".".join(part for part in (where.replace(" ", "_") if path else where, path) if part)
        raise TypeError(
            f"{name} is {got} and cannot be differentiated; differentiate a tree of floats "
            "(adapters from fquant.lora.init) and pass quantised weights as another argument"
        )


def _checked(transformed: Callable[..., Any], argnums: int | tuple[int, ...]) -> Callable[..., Any]:
    @wraps(transformed)
    def call(*args: Any, **kwargs: Any) -> Any:
        for i in (argnums,) if isinstance(argnums, int) else argnums:
            check(args[i], f"argument {i}")
        return transformed(*args, **kwargs)

    return call
