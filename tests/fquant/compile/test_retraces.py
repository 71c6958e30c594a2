"""A function that is traced again and again for the same reason says so, with the argument that changes."""

import warnings

import pytest
import torch

from fquant import jit
from fquant.compile.retraces import RetraceWarning

X = torch.arange(12.0).reshape(4, 3)
SAME = "is traced again, and for the same reason as before: "


def test_two_sizes_are_traced_without_a_word():
    captured = jit(lambda x: x * 2)
    for rows in (4, 2, 4, 2):
        assert torch.equal(captured(X[:rows]), X[:rows] * 2)
    assert len(captured.traced) == 2


def test_another_size_with_each_call_is_told_and_still_right():
    def doubled(x, y):
        return x * 2 + y

    captured = jit(doubled)
    captured(X, 1.0)
    captured(X[:3], 1.0)
    text = rf"jit\(doubled\) {SAME}x is float32\[2, 3\] with .*, and was float32\[3, 3\] .*; it has 2 traces; pass what"
    with pytest.warns(RetraceWarning, match=text) as caught:
        assert torch.equal(captured(X[:2], 1.0), X[:2] * 2 + 1)
    assert [warning.filename for warning in caught] == [__file__]
    captured(X, 2.0)  # for another reason
    with pytest.warns(RetraceWarning, match=rf"{SAME}y is 3.0, and was 2.0; it has 4 traces"):
        captured(X, 3.0)


def test_forty_signatures_are_traced():
    captured = jit(lambda x: x.sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        for rows in range(40):
            assert torch.equal(captured(torch.ones(rows, 2)), torch.tensor(2.0 * rows))
    assert len(captured.traced) == 40


def test_values_that_the_function_closes_over_are_told():
    rate = [0.1]

    def scaled(x):
        return x * rate[0]

    captured = jit(scaled)
    captured(X)
    rate[0] = 0.2
    captured(X)
    rate[0] = 0.3
    with pytest.warns(RetraceWarning, match=rf"jit\(scaled\) {SAME}`rate\[0\]` was 0.2, is 0.3"):
        captured(X)


def test_expected_traces_are_made_without_a_word_and_no_more():
    captured = jit(lambda x: x + 1, max_traces=3)
    for rows in (4, 3, 2):
        captured(X[:rows])
    with pytest.raises(RuntimeError, match=r"would be traced more than 3 times: x is float32\[1, 3\]"):
        captured(X[:1])
    assert torch.equal(captured(X), X + 1)


def test_a_trace_that_fails_is_not_counted():
    def picky(x):
        if len(x) < 4:
            raise ValueError("short")
        return x

    captured = jit(picky, max_traces=2)
    captured(X)
    for _ in range(3):
        with pytest.raises(ValueError, match="short"):
            captured(X[:3])
    captured(torch.ones(5, 3))
