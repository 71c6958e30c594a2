"""Quantising while a CUDA graph is recorded: nothing is read by the host, and bytes are those of an ordinary call."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fquant.format import AQ_2X8, DYNAMIC8, NF4, SCALE_E8M0
from fquant.packed import buffers, quantize
from tests.helpers.arrays import randn
from tests.helpers.formats import KNOWN


class NothingRead(TorchDispatchMode):
    """Refuse what a CUDA graph cannot record: numbers that the host reads, and shapes that depend on them."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name()
        reads = "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::unique"
        assert not name.startswith(reads), f"{name} waits for the device"
        masks = (
            [t for t in args[1] if t is not None and t.dtype is torch.bool] if name.startswith("aten::index") else []
        )
        assert not masks, f"{name} with a mask waits for the device"
        assert "device" not in (kwargs or {}) or name != "aten::_to_copy", "a copy between devices"
        return op(*args, **(kwargs or {}))


@pytest.fixture
def recording(monkeypatch):
    """Let tensors of this device count as those of a CUDA graph that is recorded."""
    for module in ("fquant.packed", "fquant.quantizers.tiny_blocks", "fquant.quantizers.validate"):
        monkeypatch.setattr(f"{module}.is_recording", lambda device: True)


OF_SCALES = (DYNAMIC8, SCALE_E8M0)  # which are recorded as scales of others
RECORDED = [f for f in KNOWN.values() if f.vectors is None and f not in OF_SCALES]


@pytest.mark.parametrize("format", RECORDED, ids=lambda f: f.name)
@pytest.mark.parametrize("small", [1.0, 1e-7], ids=["usual", "tiny blocks"])
def test_recorded_quantize_reads_nothing_and_gives_the_same_bytes(request, format, small):
    w = randn(48, 256)
    w[5:9] *= small
    w[7] = 0.0
    usual = quantize(w, format)  # caches tables too, as the calls before a recording do
    request.getfixturevalue("recording")
    with NothingRead():
        recorded = quantize(w, format)
    assert all(map(torch.equal, buffers(recorded), buffers(usual)))


def test_recorded_checks_are_assertions_of_the_device(recording):
    """What an ordinary call refuses, a graph refuses where the values are."""
    for bad in (float("nan"), float("inf")):
        w = randn(4, 64)
        w[2, 3] = bad
        with pytest.raises(RuntimeError, match="a weight in a CUDA graph has values that are not finite"):
            quantize(w, NF4)
    with pytest.raises(RuntimeError, match="values above 8188 in a CUDA graph; quantise outside"):
        quantize(randn(4, 64).half() * 1e4, NF4)
    with pytest.raises(RuntimeError, match="learns vectors, which a CUDA graph cannot record; quantize before"):
        quantize(randn(4, 64), AQ_2X8)


def test_what_waits_for_the_device_would_show():
    """An ordinary call reads the largest scale."""
    with pytest.raises(AssertionError, match="waits for the device"), NothingRead():
        quantize(randn(4, 64), NF4)
