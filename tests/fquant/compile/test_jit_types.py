"""A captured function has the signature and the types of the function; pyright checks the types of this file."""

import inspect
from functools import partial
from typing import assert_type

from torch import Tensor

from fquant.compile.jit import jit
from tests.helpers.qlora_step import X


def rate(x: Tensor, k: int = 2, *, z: float = 1.0) -> tuple[Tensor, int]:
    """Scale a tensor."""
    return x * k + z, k


@jit(donate=("x",))
def step(x: Tensor) -> dict[str, Tensor]:
    return {"x": x + 1}


@jit
def plain(x: Tensor) -> Tensor:
    return x + 1


def test_types():
    assert_type(jit(rate)(X, k=3, z=0.5), tuple[Tensor, int])
    assert_type(jit(rate, max_traces=3)(X), tuple[Tensor, int])
    assert_type(jit(fuse=False)(rate)(X), tuple[Tensor, int])
    assert_type(jit(partial(rate, k=3))(X), tuple[Tensor, int])
    assert_type(step(X.clone()), dict[str, Tensor])
    assert_type(plain(X), Tensor)


def test_signatures():
    for f in (rate, partial(rate, k=3), step):
        assert inspect.signature(jit(f)) == inspect.signature(f)
    captured = jit(rate)
    assert (captured.__name__, captured.__doc__) == ("rate", "Scale a tensor.")
