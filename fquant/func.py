"""torch.func's grad, grad_and_value, vjp and jvp, which check the differentiated leaves first.

torch.func rejects an integer or absent leaf without naming it. These functions raise TypeError with its path and the
fix, and are torch.func's otherwise.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from .autodiff import check_floats


def _checked(transform: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(transform)
    def checked(f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
        transformed = transform(f, argnums, has_aux)

        @wraps(transformed)
        def call(*args: Any, **kwargs: Any) -> Any:
            check({f"argument_{i}": args[i] for i in ((argnums,) if isinstance(argnums, int) else argnums)})
            return transformed(*args, **kwargs)

        return call

    return checked


grad = _checked(torch.func.grad)
grad_and_value = _checked(torch.func.grad_and_value)


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Call ``torch.func.vjp`` on checked primals."""
    check({f"argument_{i}": primal for i, primal in enumerate(primals)})
    return torch.func.vjp(f, *primals, has_aux=has_aux)


def jvp(f: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...], has_aux: bool = False) -> Any:
    """Call ``torch.func.jvp`` on checked primals."""
    check({f"argument_{i}": primal for i, primal in enumerate(primals)})
    return torch.func.jvp(f, primals, tangents, has_aux=has_aux)


def check(x: Any) -> None:
    """Raise TypeError, naming the path, unless every leaf of ``x`` is a float tensor."""
    fix = "differentiate a tree of floats (adapters from fquant.lora.init)"
    check_floats(x, f"{fix} and pass quantised weights as another argument")
