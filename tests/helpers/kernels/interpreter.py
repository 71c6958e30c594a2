"""Tests of Triton's kernels: in its interpreter, which checks that they stay within their tensors, or on a card.

    from .interpreter import interpreted, interpreter  # the latter is a fixture

    @interpreted
    def test_something(device): ...  # makes its tensors on ``device``, and its oracles on the host

TRITON_INTERPRET must be set before triton is imported, and torch's compiler or a peer may have imported it long ago. So
pytest collects and reports a marked test, and a second process computes it, with TRITON_INTERPRET=1 from the start and
FQUANT_KERNELS=triton. It is one for the whole run, because it takes seconds to start. Every pointer that is read or
written there must be inside one of the kernel's tensors.

With ``--device cuda`` the body runs in pytest's own process, with compiled kernels and tensors on the card.
"""

import importlib
import inspect
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from typing import Any

import numpy
import pytest
import torch

from fquant.kernels import dispatch

importlib.import_module("tests.conftest")  # which pytest does in its own process


def interpreted(test):
    """Mark a test to run in the interpreter's process, or, if it takes ``device``, on the card of ``--device``."""

    def here(interpreter, **params):
        interpreter(test.__module__, test.__name__, params)

    parameters = inspect.signature(test).parameters.values()
    own = inspect.Parameter("interpreter", inspect.Parameter.KEYWORD_ONLY)
    here.__signature__ = inspect.Signature([*(p.replace(kind=own.kind) for p in parameters), own])
    here.__name__, here.__doc__, here.body = test.__name__, test.__doc__, test
    return here


@pytest.fixture(scope="module")
def interpreter(request):
    """Return what runs the body of a test: in the interpreter's process, or here if ``--device`` is a card."""
    if request.config.getoption("device") != "cpu":  # no fixture, because not every test that takes this runs there
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(dispatch.VARIABLE, raising=False)
            assert dispatch.backend("cuda")[0] == "triton"
            yield run
        return
    yield in_process


def in_process(*test: Any) -> None:
    """Run the body of a test in the interpreter's process; if that dies, the next test starts another."""
    try:
        process().submit(run, *test).result()
    except BrokenProcessPool:
        process.cache_clear()
        raise


@cache
def process() -> ProcessPoolExecutor:
    """Return the interpreter's process, which is started at first use."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv(dispatch.VARIABLE, "triton")
        assert pool.submit(start).result() == ("triton", ("cuda", "cpu"))
    return pool


def stop() -> None:
    """End the interpreter's process, if there is one."""
    if process.cache_info().currsize:
        process().shutdown()


def run(module, name, params):
    """Run the body of a test in this process."""
    getattr(importlib.import_module(module), name).body(**params)


def fuses():
    """Return True if a fused product and sum is rounded once: on a card, and in the interpreter from 3.9 on."""
    if not importlib.import_module("triton").knobs.runtime.interpret:
        return True
    return hasattr(importlib.import_module("triton.runtime.interpreter")._interpreter, "fma_fp32")


def count_scalars(interpreter):
    """Let scalars bound loops: Triton 3.6 converts their arrays of one element to int, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    interpreter._patch_lang_tensor = patched


def quicken(interpreter: Any) -> Callable[[], None]:
    """Leave out what the interpreter computes for nothing, most of its time; return what to call before each launch.

    A launch replaces the builtins of Triton's language once, and not at every call of a device function. Dtypes are
    looked up once. Without ``debug`` the interpreter checks sums of integers for overflow, and drops the result.
    """
    patch, patched, language = interpreter._patch_lang, set[Any](), interpreter.tl.core
    of = interpreter._get_np_dtype
    known = cache(of)  # pointers have no hash

    def once(function: Any) -> Any:
        if function not in patched:
            patched.add(function)
            return patch(function)

    @cache
    def builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if language.is_builtin(member)]

    def replaced(package: Any, *rest: Any) -> None:
        for name in builtins(package):
            if language.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_lang, interpreter._patch_builtin = once, replaced
    interpreter._get_np_dtype = lambda dtype: known(dtype.scalar) if type(dtype.scalar) is language.dtype else of(dtype)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    return patched.clear


def start():
    """Check the pointers of kernels from now on, and return the kernels and their devices."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    count_scalars(interpreter)
    begin = quicken(interpreter)
    call, builder, bounds = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder, []

    def called(self, *args, **options):
        every = [t for arg in args for t in (arg if isinstance(arg, tuple) else (arg,))]
        some = [getattr(t, "base", t) for t in every]  # of a descriptor, its tensor
        some = [t for t in some if isinstance(t, torch.Tensor) and t.numel()]
        bounds[:] = [(t.data_ptr(), t[tuple(n - 1 for n in t.shape)].data_ptr() + t.itemsize) for t in some]
        begin()
        return call(self, *args, **options)

    def watched(touch, mask):
        def touched(self, pointers, *rest, **named):
            at, size = pointers.data[rest[mask].data], pointers.get_element_ty().primitive_bitwidth // 8
            least, most = (at.min(), at.max() + size) if at.size else (0, 0)
            if at.size and not any(low <= least and most <= high for low, high in bounds):  # not in one tensor
                within = sum((low <= at) & (at + size <= high) for low, high in bounds)
                assert within.all(), "a kernel reads or writes beyond its tensors"
            return touch(self, pointers, *rest, **named)

        return touched

    interpreter.GridExecutor.__call__ = called
    builder.create_masked_load = watched(builder.create_masked_load, 0)
    builder.create_masked_store = watched(builder.create_masked_store, 1)
    numpy.seterr(over="ignore", invalid="ignore", divide="ignore")  # a card has no warnings either
    name, module = dispatch.backend("cpu")
    return name, module.DEVICES
