"""Triton's interpreter in a process of its own, which also sees to it that kernels stay within their tensors.

    from .interpreter import interpreted, interpreter  # the latter is a fixture

    @interpreted
    def test_something(): ...

The interpreter has to be asked for before triton is imported, and torch's compiler or a peer may have imported it long
ago. So a test that is marked so is collected and reported where pytest runs, and computed in a process that has
TRITON_INTERPRET=1 from the start and FQUANT_KERNELS=triton. Every pointer that is read or written through there has to
lie in one of the tensors that the kernel was given.
"""

import importlib
import inspect
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from fquant.kernels import dispatch

importlib.import_module("tests.conftest")  # which a process without pytest has to be told


def interpreted(test):
    """A test that is computed in the interpreter's process."""

    def here(interpreter, **params):
        interpreter.submit(run, test.__module__, test.__name__, params).result()

    parameters = inspect.signature(test).parameters.values()
    own = inspect.Parameter("interpreter", inspect.Parameter.KEYWORD_ONLY)
    here.__signature__ = inspect.Signature([*(p.replace(kind=own.kind) for p in parameters), own])
    here.__name__, here.__doc__, here.body = test.__name__, test.__doc__, test
    return here


@pytest.fixture(scope="module")
def interpreter():
    """The process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv(dispatch.VARIABLE, "triton")
            assert pool.submit(start).result() == ("triton", ("cuda", "cpu"))
        yield pool


def run(module, name, params):
    """The body of a test, there."""
    getattr(importlib.import_module(module), name).body(**params)


def start():
    """Which kernels are there, and for which devices; from now on they are watched."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    call, builder, bounds = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder, []

    def called(self, *args, **options):
        some = [t for t in args if isinstance(t, torch.Tensor) and t.numel()]
        bounds[:] = [(t.data_ptr(), t[tuple(n - 1 for n in t.shape)].data_ptr() + t.itemsize) for t in some]
        return call(self, *args, **options)

    def watched(touch, mask):
        def touched(self, pointers, *rest):
            at, size = pointers.data[rest[mask].data], pointers.get_element_ty().primitive_bitwidth // 8
            within = sum((low <= at) & (at + size <= high) for low, high in bounds)
            assert within.all(), "a kernel reads or writes beyond its tensors"
            return touch(self, pointers, *rest)

        return touched

    interpreter.GridExecutor.__call__ = called
    builder.create_masked_load = watched(builder.create_masked_load, 0)
    builder.create_masked_store = watched(builder.create_masked_store, 1)
    name, module = dispatch.backend("cpu")
    return name, module.DEVICES
