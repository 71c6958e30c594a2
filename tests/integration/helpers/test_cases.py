"""Which tests run: the pairwise cover of cases, and those that ``--device cuda`` chooses.

Tests of transforms, kernels, bundles, capture and the main job take the fixture ``device``. A machine without a card
refuses the option, so a process collects the tests and applies the selection to them.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import is_chosen
from tests.helpers.cases import covered, each_value


def test_every_pair_of_values_is_in_the_cover():
    cases = [dict(zip("abc", row, strict=True)) for row in product("wxyz", range(4), (None, [1]))]
    kept = [case for case, found in zip(cases, covered(cases), strict=True) if not found]
    assert 16 <= len(kept) < len(cases)
    for one, two in combinations("abc", 2):
        assert {(str(c[one]), str(c[two])) for c in kept} == {(str(c[one]), str(c[two])) for c in cases}


def test_one_parameter_is_not_cut():
    assert covered([{"name": name} for name in "abc"]) == [False] * 3
    assert covered([{"name": name} for name in "aab"]) == [False, True, False]


def test_each_value():
    """Of a product of lists as many cases stay as the longest has values, and they are unlike each other."""
    cases: list[dict[str, Any]] = [dict(zip("abc", row, strict=True)) for row in product(range(3), "xyzw", ([1], [2]))]
    kept = [case for case, found in zip(cases, each_value(cases), strict=True) if not found]
    assert len(kept) == 4 and {case["a"] for case in kept} == {0, 1, 2} and {case["b"] for case in kept} == {*"xyzw"}
    assert each_value([{"name": name} for name in "aba"]) == [False, False, True]
    assert each_value([]) == []


# --- on a device ------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
TRITON = {  # tests of a file for a card, none where Triton is not installed
    "tests/fquant/kernels/test_triton.py": 150, "tests/fquant/kernels/triton/test_attention.py": 50,
    "tests/fquant/kernels/triton/test_decoding.py": 30, "tests/fquant/kernels/triton/test_elementwise.py": 35,
    "tests/fquant/kernels/triton/test_grouped.py": 10,
}  # fmt: skip
FEWEST = {  # the same of a folder or a file anywhere
    "tests/integration/test_transforms.py": 400, "tests/fquant/kernels/test_grouped_ops.py": 20,
    "tests/fquant/kernels/test_additive_codebooks.py": 100, "tests/fquant/kernels/test_lazy_tensors.py": 40,
    "tests/fquant/kernels/test_codec.py": 150, "tests/fquant/kernels/test_products.py": 150,
    "tests/fquant/kernels/ops": 200, "tests/shard/test_bundle.py": 7, "tests/shard/test_collectives.py": 5,
    "tests/shard/test_data.py": 1, "tests/shard/test_placement.py": 5, "tests/shard/test_rules.py": 10,
    "tests/shard/test_one_rank.py": 2, "tests/fquant/compile/test_jit.py": 20, "tests/examples/qlora": 1,
}  # fmt: skip
COLLECT = """
import json, sys, pytest

class Chosen:
    items = []

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items):
        from tests.conftest import is_chosen
        self.items += [item.nodeid for item in items if is_chosen(item, on_host=False)]
        return (yield)  # which leaves out those that are for a card alone

chosen = Chosen()
status = pytest.main(["--collect-only", "-qq", "-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[chosen])
print(json.dumps([int(status), chosen.items]))
"""


def test_what_a_device_is_for():
    fewest = FEWEST | (TRITON if find_spec("triton") else dict.fromkeys(TRITON, 0))
    command = [sys.executable, "-c", COLLECT, *fewest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    status, chosen = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stdout
    found = {path: sum(name.startswith(path) for name in chosen) for path in fewest}
    assert {path: n for path, n in found.items() if n < fewest[path]} == {}


def item(*fixtures, cuda=False, **params):
    marker = "a marker" if cuda else None
    return SimpleNamespace(
        fixturenames=fixtures, callspec=SimpleNamespace(params=params), get_closest_marker=lambda name: marker
    )


@pytest.mark.parametrize(
    ("test", "host", "card"),
    [
        (item("tmp_path"), True, False),
        (item("device"), True, True),
        (item("device", cuda=True), False, True),
        (item("device", device="meta"), True, False),  # a parameter of that name
        (item("device", backend="reference"), True, True),
        (item("device", backend="cpu:avx2"), True, False),
    ],
)
def test_the_choice(test, host, card):
    assert is_chosen(test, on_host=True) is host and is_chosen(test, on_host=False) is card
