"""Tests of examples.qlora.fitting: which mode a run gets, and the line of a run that fits in none."""

import re
from types import SimpleNamespace

import pytest
import torch

from examples.qlora import fitting
from examples.qlora.options import Options
from fquant.compile.roofline import DEVICES
from fquant.device import HOST
from tests.helpers.model_folders import tiny_model

GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rank(monkeypatch):
    """A rank on a CUDA device with ``free`` GiB; the base takes ``base``, and a mode so much beside it."""

    def pretend(free, base, beside):
        def price(job, axes, device):
            held = base / axes.get("fsdp", 1) / (10 if job.offload else 1)
            return SimpleNamespace(peak=int((held + beside[job.checkpoint]) * GIB), base=int(held * GIB))

        monkeypatch.setattr(fitting, "parse", torch.device)
        monkeypatch.setattr(fitting.pricing, "price", price)
        monkeypatch.setattr(fitting.roofline, "of", lambda device: DEVICES["h100"])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), int(80 * GIB)))

    return pretend


BESIDE = {"none": 30, "selective": 20, "full": 10}


@pytest.mark.parametrize("free, mode", [(50, "none"), (35, "selective"), (20, "full")])
def test_the_fastest_mode_that_fits_on_a_device(model, rank, free, mode):
    rank(free, 5, BESIDE)
    assert fitting.choose_checkpoint(Options(model=model, device="cuda"), {"fsdp": 1}) == mode


@pytest.mark.parametrize(
    "free, base, options, axes, wanted",
    [
        (40, 100, {}, {"fsdp": 1}, "needs 110.00 GiB a rank, and cuda has 36.00 GiB for it; use --mesh fsdp=4, or"),
        (40, 300, {}, {"fsdp": 1}, "use --mesh fsdp=16$"),
        (40, 300, {"offload": "block"}, {"fsdp": 1}, "use --mesh fsdp=2$"),
        (40, 100, {}, {"dp": 2, "fsdp": 2}, "needs 60.00 GiB a rank, .*; use --mesh dp=2,fsdp=4, or --offload block"),
        (10, 100, {}, {"fsdp": 1}, "use more fsdp, and a smaller --batch or --seq"),
        (10, 1, {}, {"fsdp": 1}, "use a smaller --batch or --seq"),
        (30, 5, {"checkpoint": "none"}, {"fsdp": 1}, "needs 35.00 GiB a rank, .*; use --checkpoint full"),
    ],
)  # fmt: skip
def test_what_would_fit_is_named(model, rank, free, base, options, axes, wanted):
    rank(free, base, BESIDE)
    with pytest.raises(ValueError, match="^--model ") as caught:
        fitting.choose_checkpoint(Options(model=model, device="cuda", **options), axes)
    assert re.search(wanted, str(caught.value)) and "\n" not in str(caught.value)


def test_the_mode_that_is_asked_for_is_kept(model, rank):
    rank(50, 5, BESIDE)
    assert fitting.choose_checkpoint(Options(model=model, device="cuda", checkpoint="full"), {"fsdp": 1}) == "full"
    rank(0, 5, BESIDE)
    assert fitting.choose_checkpoint(Options(model=model, device="cpu", checkpoint="none"), {"fsdp": 1}) == "none"


@pytest.mark.parametrize("asked, on_host, on_cuda", [(None, True, False), (True, True, True), (False, False, False)])
def test_sums_are_ordered_on_the_host_unless_asked_otherwise(asked, on_host, on_cuda):
    options = Options(ordered=asked)
    assert (options.adds_in_order(HOST), options.adds_in_order(torch.device("cuda"))) == (on_host, on_cuda)
    assert not Options(objective="kto").adds_in_order(HOST)
