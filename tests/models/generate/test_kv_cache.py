"""The slots of a cache against a list of tokens, and attention to them against the formula of whole sequences."""

import dataclasses

import pytest
import torch

from fquant.kernels.reference.causal_attention import dense
from models.generate import kv_cache
from tests.helpers.hf_models import GQA

WINDOWED = dataclasses.replace(GQA, window=8, full_layers=(1,))
LENGTHS = torch.tensor([3, 8, 9, 21])
NONE = torch.empty(4, 0, dtype=torch.bool)


def sequences(t, seed=0, heads=2):
    return torch.randn(4, t, heads, 16, generator=torch.Generator().manual_seed(seed))


def test_tokens_of_rows():
    tokens = torch.randint(11, (4, 21), generator=torch.Generator().manual_seed(0))
    seen = kv_cache.tokens_of(tokens, LENGTHS, 11)
    for row, (text, length) in enumerate(zip(tokens.tolist(), LENGTHS.tolist(), strict=True)):
        assert seen[row].nonzero().flatten().tolist() == sorted(set(text[:length]))
    assert torch.equal(kv_cache.tokens_of(tokens, LENGTHS, 0), NONE)


@pytest.mark.parametrize("longest", [21, 40])
def test_slots_hold_the_last_tokens(longest):
    keys = [sequences(21, i) for i in range(2)]
    held = kv_cache.from_sequence(keys, keys, LENGTHS, WINDOWED, longest, NONE)
    assert [x.shape[1] for x in held.keys] == [8, longest]
    for row, length in enumerate(LENGTHS.tolist()):
        for p in range(length):
            assert torch.equal(held.keys[1][row, p], keys[1][row, p])
            if p >= length - 8:
                assert torch.equal(held.values[0][row, p % 8], keys[0][row, p])


def test_a_window_longer_than_the_sequence():
    held = kv_cache.from_sequence([sequences(5)] * 2, [sequences(5)] * 2, LENGTHS.clamp(max=5), WINDOWED, 6, NONE)
    assert [x.shape[1] for x in held.keys] == [6, 6]


@pytest.mark.parametrize(
    "window, sinks, cap", [(None, False, None), (8, False, None), (8, True, None), (None, True, 2.0)]
)
def test_attention_is_that_of_the_sequence(window, sinks, cap):
    """Write tokens one at a time, and attend from each; compare with causal attention over all of them."""
    cfg = dataclasses.replace(WINDOWED, window=window, full_layers=())
    q, k, v = sequences(40, 1, heads=4), sequences(40, 2), sequences(40, 3)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    wanted, _ = dense(*heads, window=window, cap=cap, sinks=None if sink is None else sink.expand(4, -1))
    some = [x[:, :21] for x in (k, v)]
    held = kv_cache.from_sequence(*([x] * 2 for x in some), LENGTHS, cfg, 64, NONE)
    keys, values, rows = held.keys[0], held.values[0], torch.arange(4)
    for i in range(15):
        at = LENGTHS + i
        keys, values = (kv_cache.write(x, new[rows, at][:, None], at, window) for x, new in ((keys, k), (values, v)))
        y = kv_cache.attend(q[rows, at][:, None], keys, values, at, None, cap, sink)
        torch.testing.assert_close(y[:, 0], wanted[rows, :, at], rtol=0, atol=2e-6)


def test_a_full_cache_refuses():
    with pytest.raises(IndexError, match="out of bounds"):
        kv_cache.write(sequences(5), sequences(1), torch.tensor([1, 2, 3, 5]), None)
