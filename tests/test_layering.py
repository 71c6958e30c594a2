"""The house: who may import whom, what no file may contain, and how long a file may be."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("fquant", "shard", "models", "examples")
OURS = (*PACKAGES, "tests")
GROUND = ("tree", "lazy", "comm", "remat", "capture", "graph", "flops", "order")  # what shard may import of fquant
MAY_IMPORT = {
    "fquant": {"fquant"},
    "shard": {"shard", "fquant"},
    "models": {"models", "fquant"},
    "examples": set(PACKAGES),
    "tests": set(OURS),
}
CODE_IN_DATA = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
TREES = ("torch.utils._pytree", "torch.utils._cxx_pytree", "torch.utils.pytree", "optree")
CALLS = ("eval", "exec", "__import__")
LONGEST = {"tests": 400}  # lines; tables of cases may be longer than code
LONGEST_CODE = 300


def imports(path: str, module: ast.Module) -> list[tuple[int, str]]:
    """``(line, dotted target)`` of every import, wherever it stands; ``from a import b`` is the target ``a.b``."""
    package = list(Path(path).parts[:-1])
    found = []
    for at in ast.walk(module):
        if isinstance(at, ast.Import):
            found += [(at.lineno, name.name) for name in at.names]
        elif isinstance(at, ast.ImportFrom):
            start = package[: len(package) - (at.level - 1)] if at.level <= len(package) else []
            base = ".".join([*(start if at.level else []), *filter(None, [at.module])])
            found += [(at.lineno, f"{base}.{name.name}".lstrip(".")) for name in at.names]
        elif isinstance(at, ast.Call) and ast.unparse(at.func).split(".")[-1] == "import_module":
            name = at.args[0] if at.args else None
            known = isinstance(name, ast.Constant) and isinstance(name.value, str) and not name.value.startswith(".")
            found.append((at.lineno, name.value if known else "<computed>"))  # type: ignore[union-attr]
    return found


def within(target: str, names: tuple[str, ...]) -> bool:
    return any(target == name or target.startswith(name + ".") for name in names)


def wrong_imports(path: str, module: ast.Module) -> list[str]:
    owner = Path(path).parts[0]
    found = []
    for line, target in imports(path, module):
        top, _, rest = target.partition(".")
        if top in OURS and top not in MAY_IMPORT[owner]:
            found.append(f"{path}:{line}: {owner} imports {target}")
        elif owner == "shard" and top == "fquant" and rest.split(".")[0] not in GROUND:
            found.append(f"{path}:{line}: shard imports {target}; of fquant only {', '.join(GROUND)}")
        if owner in PACKAGES:
            if target == "<computed>":
                found.append(f"{path}:{line}: the imported name is computed")
            if within(target, CODE_IN_DATA + ("functorch", "torch.load", "torch.save")):
                found.append(f"{path}:{line}: imports {target}")
            if within(target, TREES) and path != "fquant/tree.py":
                found.append(f"{path}:{line}: imports {target}; use fquant.tree")
    return found


def wrong_code(path: str, module: ast.Module) -> list[str]:
    found = []
    for at in ast.walk(module):
        if isinstance(at, ast.Name) and at.id in CALLS:
            found.append(f"{path}:{at.lineno}: {at.id}")
        elif isinstance(at, ast.Attribute):
            name = ast.unparse(at)
            if name in ("torch.load", "torch.save") or (name in TREES and path != "fquant/tree.py"):
                found.append(f"{path}:{at.lineno}: {name}")
        elif isinstance(at, ast.keyword) and at.arg == "allow_pickle":
            found.append(f"{path}:{at.value.lineno}: allow_pickle")
    return found


def without_docstring(path: str, module: ast.Module) -> list[str]:
    definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [at for at in module.body if isinstance(at, definition) and not at.name.startswith("_")]
    told = {at.name for at in public if ast.get_docstring(at)}  # one of the overloads of a name suffices
    found = [f"{path}:{at.lineno}: {at.name} has no docstring" for at in public if at.name not in told]
    if module.body and not ast.get_docstring(module):
        found.append(f"{path}:1: the module has no docstring")
    return found


def check(path: str, source: str) -> list[str]:
    """What is wrong with the file at ``path`` (relative to the repository, with slashes), one line a fault."""
    module = ast.parse(source, path)
    found = wrong_imports(path, module)
    if Path(path).parts[0] in PACKAGES:
        found += wrong_code(path, module) + without_docstring(path, module)
    longest = LONGEST.get(Path(path).parts[0], LONGEST_CODE)
    if (lines := len(source.splitlines())) > longest:
        found.append(f"{path}: {lines} lines, wanted at most {longest}")
    return found


FILES = sorted(p.relative_to(ROOT).as_posix() for folder in OURS for p in (ROOT / folder).rglob("*.py"))


def test_every_package_is_looked_at():
    assert {path.split("/")[0] for path in FILES} == set(OURS)
    assert {"fquant/tree.py", "fquant/io/safetensors.py", "tests/test_layering.py"} <= set(FILES)


@pytest.mark.parametrize("path", FILES)
def test_file(path):
    assert check(path, (ROOT / path).read_text("utf-8")) == []


WRONG = {
    "fquant imports shard": ("fquant/a.py", "import shard.mesh", "fquant imports shard.mesh"),
    "fquant imports models": ("fquant/a.py", "from models import hf", "fquant imports models.hf"),
    "fquant imports examples": ("fquant/io/a.py", "from examples import data", "fquant imports examples.data"),
    "fquant imports tests": ("fquant/io/a.py", "import tests", "fquant imports tests"),
    "too many dots": ("fquant/io/a.py", "from ...shard import mesh", "fquant imports shard.mesh"),
    "as an alias": ("fquant/a.py", "import shard as s", "fquant imports shard"),
    "inside a function": ("fquant/a.py", "def _f():\n    import models", "a.py:3: fquant imports models"),
    "by name": ("fquant/a.py", "import importlib\nimportlib.import_module('shard')", "fquant imports shard"),
    "by a computed name": ("fquant/a.py", "from importlib import import_module as f\nimport_module(x)", "computed"),
    "by a relative name": ("fquant/a.py", "import importlib\nimportlib.import_module('..shard', p)", "computed"),
    "shard imports models": ("shard/a.py", "from models.blocks import mlp", "shard imports models.blocks.mlp"),
    "shard imports packed": ("shard/a.py", "from fquant.packed import Packed", "shard imports fquant.packed.Packed"),
    "shard, from fquant": ("shard/a.py", "from fquant import tree, packed", "shard imports fquant.packed"),
    "shard, all of fquant": ("shard/a.py", "import fquant", "shard imports fquant;"),
    "shard, a star": ("shard/a.py", "from fquant import *", r"shard imports fquant.*"),
    "shard, dots": ("shard/a.py", "from ..fquant.linear import linear", "shard imports fquant.linear.linear"),
    "models imports shard": ("models/a.py", "from shard import mesh", "models imports shard.mesh"),
    "models imports examples": ("models/a.py", "import examples.data", "models imports examples.data"),
    "examples imports tests": ("examples/a.py", "import tests.ranks", "examples imports tests.ranks"),
    "pytree": ("fquant/a.py", "from torch.utils import _pytree as p", "imports torch.utils._pytree; use"),
    "pytree, inside": (
        "shard/a.py",
        "from torch.utils._pytree import tree_map",
        "imports torch.utils._pytree.tree_map",
    ),
    "pytree, by attribute": ("models/a.py", "import torch\ntorch.utils._pytree.tree_map(f, x)", "torch.utils._pytree"),
    "pytree, elsewhere": ("examples/tree.py", "import torch.utils._pytree", "imports torch.utils._pytree"),
    "functorch": ("fquant/a.py", "from functorch import grad", "imports functorch.grad"),
    "pickle": ("fquant/a.py", "import pickle", "imports pickle"),
    "pickle, from": ("examples/a.py", "from pickle import loads", "imports pickle.loads"),
    "eval": ("models/a.py", "x = eval('1')", "a.py:2: eval"),
    "exec": ("models/a.py", "f = exec", "a.py:2: exec"),
    "torch.load": ("shard/a.py", "import torch\ntorch.load('x')", "a.py:3: torch.load"),
    "torch.save": ("shard/a.py", "from torch import save", "imports torch.save"),
    "numpy's pickle": ("shard/a.py", "numpy.load('x', allow_pickle=True)", "a.py:2: allow_pickle"),
    "function without docstring": ("shard/a.py", "def f(): pass", "f has no docstring"),
    "class without docstring": ("shard/a.py", "class A:\n    x = 1", "A has no docstring"),
    "long": ("fquant/a.py", "\n" * 300, "a.py: 301 lines"),
}
RIGHT = {
    "shard, ground floor": ("shard/a.py", "from fquant import tree, comm\nfrom fquant.remat import remat"),
    "shard, ground floor as modules": ("shard/a.py", "import fquant.capture\nfrom ..fquant.tree import node"),
    "shard, itself": ("shard/a.py", "from .mesh import mesh\nfrom . import spec\nimport shard.spec"),
    "fquant, itself": ("fquant/io/a.py", "from ..tree import node\nfrom .. import packed\nfrom fquant import lora"),
    "models": ("models/a.py", "from fquant import lora\nfrom .config import Config"),
    "examples": ("examples/a.py", "import shard\nfrom models import hf\nfrom . import data"),
    "methods of these names": ("models/a.py", "model.eval()\nsafetensors.torch.save_file(x)\ntorch_load = 1"),
    "names that only begin alike": ("fquant/a.py", "import sharded, models_of_mine, pickletools"),
    "private functions": ("fquant/a.py", "def _f(): pass"),
    "tests": ("tests/a.py", "import pickle\ndef test_it(): pass"),
}


@pytest.mark.parametrize("path, source, fault", WRONG.values(), ids=WRONG)
def test_wrong_example_is_found(path, source, fault):
    found = check(path, '"""A module."""\n' + source)
    assert len(found) == 1 and fault in found[0], found


@pytest.mark.parametrize("path, source", RIGHT.values(), ids=RIGHT)
def test_right_example_passes(path, source):
    assert check(path, '"""A module."""\n' + source) == []
