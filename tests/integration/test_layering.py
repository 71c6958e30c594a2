"""The house: who may import whom, what no file may contain, and how long a file may be."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fquant", "shard", "models", "examples")
OURS = (*PACKAGES, "tests")
# What shard may import of fquant; autodiff for the Function that opens a block to be trained.
GROUND = ("tree", "lazy", "device", "communication", "activation_checkpoint", "compile", "autodiff", "global_norm")
TRAINED = ("quantized_training.weights",)  # and what shard/trained/ may too, for weights that are trained in codes
CHECKPOINT = ("io.safetensors", "io.tree_json", "io.files")  # and what shard/checkpoint/ may too
ORDERED = ("kernels.batch_invariant",)  # and what shard/ordered/ may too
COMPILE_FACE = (  # and of the compiler
    "Captured", "Pass", "all_gather_text", "exchange_by", "flops", "graph", "is_traced", "liveness", "roofline",
)  # fmt: skip
COMPILE = ("compile", "device", "tree", "autodiff", "kernels")  # what the compiler may import of fquant
PASSES = ("compile.graph", "compile.liveness", "compile.passes", "device", "kernels", "tree")  # and its passes
MOST_FILES = 16  # Python files in a folder
MAY_IMPORT = {
    "fquant": {"fquant"},
    "shard": {"shard", "fquant"},
    "models": {"models", "fquant"},
    "examples": set(PACKAGES),
    "tests": set(OURS),
}
FACES = [[name] for name in COMPILE_FACE]
CODE_IN_DATA = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
TREES = ("torch.utils._pytree", "torch.utils._cxx_pytree", "torch.utils.pytree", "optree")
CALLS = ("eval", "exec", "__import__")
BACKENDS = tuple(f"fquant/kernels/{name}" for name in ("reference/", "cpu/", "triton/", "additive_codebooks.py"))
FOLLOW_DEVICES = ("fquant/", "shard/", "models/")  # which compute where their arguments are
NAME_DEVICES = ("fquant/kernels/", "fquant/device.py")  # but these
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
        elif path.startswith("shard/trained/") and top == "fquant" and within(rest, TRAINED):
            continue
        elif path.startswith("shard/checkpoint/") and top == "fquant" and within(rest, CHECKPOINT):
            continue
        elif path.startswith("shard/ordered/") and top == "fquant" and within(rest, ORDERED):
            continue
        elif owner == "shard" and top == "fquant" and rest.split(".")[0] not in GROUND:
            found.append(f"{path}:{line}: shard imports {target}; of fquant only {', '.join(GROUND)}")
        elif (
            owner == "shard"
            and within(target, ("fquant.compile",))
            and rest.split(".")[1:2] not in FACES
            and rest != "compile"
        ):
            found.append(f"{path}:{line}: shard imports {target}; of the compiler only {', '.join(COMPILE_FACE)}")
        elif path.startswith("fquant/compile/passes/") and top == "fquant" and not within(rest, PASSES):
            found.append(f"{path}:{line}: a pass imports {target}; of fquant only {', '.join(PASSES)}")
        elif path.startswith("fquant/compile/") and top == "fquant" and not within(rest, COMPILE):
            found.append(f"{path}:{line}: the compiler imports {target}; of fquant only {', '.join(COMPILE)}")
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
        elif isinstance(at, ast.Constant) and at.value in ("cpu", "cpu:0"):
            if path.startswith(FOLLOW_DEVICES) and not path.startswith(NAME_DEVICES):
                found.append(
                    f"{path}:{at.lineno}: {at.value!r}; follow the device of a tensor, or use fquant.device.HOST"
                )
    return found


@cache
def ops() -> set[str]:
    """The names of the ops, whose docstrings are at their definitions and not in every backend."""
    files = [*(ROOT / "fquant/kernels/ops").glob("*.py"), ROOT / "fquant/kernels/packed_ops.py"]
    trees = [ast.parse(path.read_text("utf-8")) for path in files]
    return {at.name for tree in trees for at in tree.body if isinstance(at, ast.FunctionDef) and ast.get_docstring(at)}


def without_docstring(path: str, module: ast.Module) -> list[str]:
    definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [at for at in module.body if isinstance(at, definition) and not at.name.startswith("_")]
    told = {at.name for at in public if ast.get_docstring(at)}  # one of the overloads of a name suffices
    told |= ops() if path.startswith(BACKENDS) else set()
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


def crowded(files: list[str]) -> list[str]:
    """The folders that hold more than ``MOST_FILES`` Python files."""
    count = Counter(path.rpartition("/")[0] for path in files)
    return [f"{folder}: {n} files, wanted at most {MOST_FILES}" for folder, n in count.items() if n > MOST_FILES]


FILES = sorted(p.relative_to(ROOT).as_posix() for folder in OURS for p in (ROOT / folder).rglob("*.py"))


def test_no_folder_is_crowded():
    assert crowded(FILES) == []
    assert crowded([f"a/{i}.py" for i in range(17)]) == ["a: 17 files, wanted at most 16"]


def test_no_test_imports_another():
    for path in FILES:
        if Path(path).name.startswith("test_"):
            targets = [target for _, target in imports(path, ast.parse((ROOT / path).read_text("utf-8")))]
            assert not [t for t in targets if t.startswith("tests.") and ".test_" in t], path


def hidden_modules(face: ast.Module, modules: set[str]) -> set[str]:
    """The ``modules`` of a package that its ``__init__`` hides: it binds their name to something else."""
    bound = set()
    for at in face.body:
        if isinstance(at, ast.ImportFrom):
            bound |= {name.asname or name.name for name in at.names if (at.level, at.module) != (1, None)}
        elif isinstance(at, ast.FunctionDef | ast.ClassDef):
            bound.add(at.name)
    return bound & modules


FACES_OF = [path for path in FILES if path.endswith("/__init__.py") and not path.startswith("tests")]


@pytest.mark.parametrize("path", FACES_OF)
def test_no_module_is_hidden_by_its_face(path):
    folder = (ROOT / path).parent
    modules = {at.stem for at in folder.glob("*.py")} | {at.parent.name for at in folder.glob("*/__init__.py")}
    assert hidden_modules(ast.parse((ROOT / path).read_text("utf-8")), modules) == set()
    assert hidden_modules(ast.parse("from . import a\nfrom .a import a, b"), {"a"}) == {"a"}


def test_every_package_is_looked_at():
    assert {path.split("/")[0] for path in FILES} == set(OURS)
    assert {"fquant/tree.py", "fquant/io/safetensors.py", "tests/integration/test_layering.py"} <= set(FILES)


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
    "shard, inside the compiler": ("shard/a.py", "from fquant.compile.jit import jit", "of the compiler only"),
    "shard, a module of the compiler": ("shard/a.py", "from fquant.compile import memory", "of the compiler only"),
    "the compiler imports models of weights": ("fquant/compile/a.py", "from .. import packed", "the compiler imports"),
    "a pass imports the tracer": ("fquant/compile/passes/a.py", "from ..trace import trace", "a pass imports"),
    "models imports shard": ("models/a.py", "from shard import mesh", "models imports shard.mesh"),
    "models imports examples": ("models/a.py", "import examples.common.data", "models imports examples.common.data"),
    "examples imports tests": ("examples/a.py", "import tests.helpers.ranks", "examples imports tests.helpers.ranks"),
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
    "a device by name": ("shard/a.py", "t = torch.empty(2, device='cpu')", "a.py:2: 'cpu'; follow the device"),
    "a comparison with its type": ("models/a.py", "b = t.device.type == 'cpu'", "a.py:2: 'cpu'; follow the device"),
    "a device by number": ("fquant/io/a.py", "t.to('cpu:0')", "a.py:2: 'cpu:0'; follow the device"),
    "function without docstring": ("shard/a.py", "def f(): pass", "f has no docstring"),
    "op without docstring": ("fquant/kernels/ops/a.py", "def silu(x): pass", "silu has no docstring"),
    "function of a backend": ("fquant/kernels/cpu/a.py", "def load(): pass", "load has no docstring"),
    "class without docstring": ("shard/a.py", "class A:\n    x = 1", "A has no docstring"),
    "long": ("fquant/a.py", "\n" * 300, "a.py: 301 lines"),
}
RIGHT = {
    "shard, ground floor": (
        "shard/a.py",
        "from fquant import tree, communication\nfrom fquant.activation_checkpoint import remat",
    ),
    "shard, ground floor as modules": ("shard/a.py", "import fquant.compile\nfrom ..fquant.tree import node"),
    "shard, itself": ("shard/a.py", "from .mesh import mesh\nfrom . import spec\nimport shard.rules"),
    "fquant, itself": ("fquant/io/a.py", "from ..tree import node\nfrom .. import packed\nfrom fquant import lora"),
    "models": ("models/a.py", "from fquant import lora\nfrom .config import Config"),
    "examples": ("examples/a.py", "import shard\nfrom models import hf\nfrom . import data"),
    "methods of these names": ("models/a.py", "model.eval()\nsafetensors.torch.save_file(x)\ntorch_load = 1"),
    "names that only begin alike": ("fquant/a.py", "import sharded, models_of_mine, pickletools"),
    "op of a backend": ("fquant/kernels/cpu/a.py", "def silu(x): pass"),
    "a device of a kernel": ("fquant/kernels/cpu/a.py", "t = torch.empty(2, device='cpu')"),
    "a device of a program": ("examples/a.py", "device = 'cpu'"),
    "a device as a value": ("fquant/a.py", "t = torch.empty(2, device=HOST)\nu = t.cpu()\n'cpus: cpu'"),
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
