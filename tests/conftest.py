"""One thread a process (two xdist workers on two cores), no network, deterministic hypothesis, and who runs what.

``--device cuda`` runs the tests that take the fixture ``device``, and no others: those of a GPU. The marker ``cuda`` is
for tests that show nothing on the host.

A worker takes whole files, so that what the tests of a file share is made once; files that name the same group,
``pytest.mark.xdist_group("ranks")``, go to one worker together, so that there is one pool of ranks. (xdist's own
``--dist loadgroup`` writes the group into the name of a test, which from pytest 9.2 on has no effect: its issue 1386.)
"""

import gc
import os
import re
import signal
import sys
from functools import cache

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.helpers.cases import FEWEST, covered, each_value

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a job in the background, which programs inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--device", default="cpu", help="what the tests of the fixture `device` run on: cpu, cuda or cuda:N"
    )


def pytest_configure(config):
    if config.getoption("device") != "cpu":
        from fquant.device import parse

        try:
            parse(config.getoption("device"))
        except ValueError as error:
            raise pytest.UsageError(f"--{error}") from None
        import torch

        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # bounds are those of float32 sums
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if config.getoption("dist") == "no":  # this process runs tests, and does not only hand them out
        import hypothesis
        import torch

        torch.set_num_threads(1)
        hypothesis.settings.register_profile("fquant", deadline=None, derandomize=True, database=None, max_examples=25)
        hypothesis.settings.load_profile("fquant")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what the device of ``--device`` has no use for, and mark the cases of full products as slow."""
    on_host = config.getoption("device") == "cpu"
    if rest := [item for item in items if not is_chosen(item, on_host)]:
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if is_chosen(item, on_host)]
    mark_slow(items)


def is_chosen(item, on_host):
    """Whether a test is one for the host, or one that takes the fixture ``device`` and not a parameter of that name.

    Its parameter ``backend`` may name instruction sets of the host, which a card has no use for.
    """
    if on_host:
        return not item.get_closest_marker("cuda")
    given = parameters(item)
    return "device" in item.fixturenames and "device" not in given and not str(given.get("backend")).startswith("cpu")


def parameters(item):
    """The parameters of a case, by name."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def mark_slow(items):
    """Mark the cases of full products as slow, except those of a cover: of pairs, or of values if it is marked so."""
    tests = {}
    for item in items:
        if hasattr(item, "callspec"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        alone = cases[0].get_closest_marker("each_value")
        if alone or len(cases) > FEWEST:
            rest = [item for item in cases if not item.get_closest_marker("slow")]
            cover = each_value if alone else covered
            for item, others_cover in zip(rest, cover(item.callspec.params for item in rest), strict=True):
                if others_cover:
                    item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    gc.freeze()  # modules and tests: not for every collection to walk


def pytest_sessionfinish():
    if "tests.helpers.ranks" in sys.modules:  # xdist ends its workers without what Python does at exit
        sys.modules["tests.helpers.ranks"].folder().cleanup()
    if "tests.helpers.kernels.interpreter" in sys.modules:
        sys.modules["tests.helpers.kernels.interpreter"].stop()


class LoadGroups(LoadFileScheduling):
    def _split_scope(self, nodeid):
        return group(self.config.rootpath / super()._split_scope(nodeid))


@cache
def group(path):
    """What ``path`` is run with: the group that it names, or itself."""
    found = re.search(r'xdist_group\("(\w+)"\)', path.read_text())
    return found[1] if found else str(path)


def pytest_xdist_make_scheduler(config, log):
    return LoadGroups(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def device(request):
    """The device of ``--device``: inputs are made there, and oracles computed on the host or in float64."""
    from fquant.device import parse

    return parse(request.config.getoption("device"))


@pytest.fixture
def twice(monkeypatch):
    """What a captured function computes at its first call, node by node, is what it computes at every other."""
    import torch

    from fquant import tree
    from fquant.compile.trace import Captured
    from tests.helpers.formats import alike

    first = Captured.first

    def both(captured, *tensors):
        if torch._C._len_torch_dispatch_stack():
            return first(captured, *tensors)
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        copies = {where: storage.clone() for where, storage in storages.items()}
        same = [(copies[t.untyped_storage()._cdata], t.storage_offset(), t.shape, t.stride()) for t in tensors]
        drawn = torch.get_rng_state()
        gave, captured = first(captured, *(t.new_empty(0).set_(*lies) for t, lies in zip(tensors, same, strict=True)))
        torch.set_rng_state(drawn)
        got = captured(*tensors)
        assert tree.structure(got) == tree.structure(gave)
        for now, before in zip(tree.leaves(got), tree.leaves(gave), strict=True):
            assert alike(now, before) if isinstance(now, torch.Tensor) else now is before
        return got, captured

    monkeypatch.setattr(Captured, "first", both)


@pytest.fixture
def no_kernel(monkeypatch):
    """Fail the test if a call reaches the C library."""

    def reached(*args):
        raise AssertionError("a malformed call got as far as C")

    for name, module in list(sys.modules.items()):
        if name.startswith("fquant.kernels.cpu.") and hasattr(module, "call"):
            monkeypatch.setattr(module, "call", reached)
