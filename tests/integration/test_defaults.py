"""Nothing depends on torch's default dtype or device: models are loaded under other ones, and scripts set them.

A kernel's table that is made at its first use and kept would be silently wrong. So each case is a process of its own,
which runs tests/helpers/defaults.py, and every call that makes a tensor has to name dtype and device.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fquant.kernels.dispatch import VARIABLE
from tests.helpers import defaults
from tests.helpers.cases import slow_after

ROOT = Path(__file__).parents[2]
MAKERS = {
    "arange", "asarray", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
ALLOWED = {("fquant/random.py", "key")}  # which is where what is made from it goes, as documented


@pytest.fixture
def wanted(monkeypatch):
    """The results under the defaults that a process begins with: those of this process."""
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device() == torch.device("cpu")
    monkeypatch.setenv(VARIABLE, "")
    return defaults.digests()


def computed(state):
    """Return the lines that a process prints in a state of torch."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.defaults", state],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("state", slow_after(1, ["bfloat16", "float64", "meta"]))
def test_results_do_not_depend_on_defaults(state, wanted):
    assert len(wanted) == 2 * len(defaults.COMPUTED) and not [line for line in wanted if "Error" in line]
    assert computed(state) == wanted


def calls(path):
    """Calls of torch that make a tensor, by the innermost function that they are in."""
    found = []

    def visit(node, name):
        for child in ast.iter_child_nodes(node):
            made = isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in MAKERS
            if made and ast.unparse(child.func.value) == "torch":
                found.append((name, child))
            visit(child, child.name if isinstance(child, ast.FunctionDef) else name)

    visit(ast.parse(path.read_text()), "")
    return found


def test_whatever_makes_a_tensor_says_its_dtype_and_device():
    """A range of integers is of int64 in any case."""
    files = [path for top in ("fquant", "shard", "models") for path in sorted((ROOT / top).rglob("*.py"))]
    missing, seen = [], 0
    for path in files:
        for name, call in calls(path):
            seen += 1
            given = {keyword.arg for keyword in call.keywords}
            wanted = {"device"} if call.func.attr == "arange" else {"dtype", "device"}
            where = str(path.relative_to(ROOT))
            if None not in given and wanted - given and (where, name) not in ALLOWED:
                missing.append(f"{where}:{call.lineno} {ast.unparse(call)} without {', '.join(sorted(wanted - given))}")
    assert not missing and seen > 50
