"""(IA)³ factors as a PEFT directory, written and read.

    adapter_config.json          peft_type IA3, target_modules, feedforward_modules
    adapter_model.safetensors    base_model.model.<module>.ia3_l, [1 in] of a feedforward module, else [out 1]

A module of PEFT has factors of its inputs or of its outputs, never both. Module names and paths are those of
:mod:`fquant.io.peft`. Refused by name: whole weights (modules_to_save), transposed weights (fan_in_fan_out).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..adapted.nodes import Ia3
from ..packed import FLOATS
from ..tree import expect
from . import safetensors
from .files.reading import inside
from .linear_regex import check_name, matcher
from .peft import WEIGHTS
from .peft_config import CONFIG, values
from .peft_tensors import PREFIX, cast
from .tree_json import Rule, one_of

SUFFIX = ".ia3_l"
IGNORED = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "init_ia3_weights", "peft_version",
    "revision", "target_modules", "task_type",
}  # fmt: skip
_is_names = lambda x: type(x) is list and set(map(type, x)) <= {str} and len(x) <= 1000
READ: dict[str, tuple[Any, Rule]] = {
    "peft_type": (None, one_of("IA3")),
    "fan_in_fan_out": (False, one_of(False, None)),
    "feedforward_modules": (None, (lambda x: x is None or type(x) is str or _is_names(x), "a pattern or a list")),
}


def save(
    folder: str | Path, adapters: dict[str, Ia3], module_name: Callable[[str], str], base_model: str = "", *,
    task_type: str | None = "CAUSAL_LM",
) -> None:  # fmt: skip
    """Write factors as a PEFT directory, tensors in float32.

    The arguments are those of ``peft.save``. Raises ValueError, before anything is written, for factors of both inputs
    and outputs, or of neither, and for two paths of one module.
    """
    expect(adapters, f"{folder}: got no adapters, wanted at least one")
    tensors: dict[str, Tensor] = {}
    feedforward: list[str] = []
    for path, ia3 in adapters.items():
        with tree.at(path):
            expect(isinstance(ia3, Ia3), f"got {type(ia3).__name__}, wanted an Ia3", TypeError)
            both = (ia3.inputs is None) == (ia3.outputs is None)
            expect(not both, "got factors of inputs and outputs, or of neither; PEFT has one of them a module")
            module = module_name(path)
            name = PREFIX + module + SUFFIX
            expect(name not in tensors, f"got the module {module} of another adapter, wanted its own; fix module_name")
        factors = (ia3.outputs if ia3.inputs is None else ia3.inputs).detach().to(torch.float32)  # type: ignore[union-attr]
        tensors[name] = factors[:, None] if ia3.inputs is None else factors[None]
        feedforward += [] if ia3.inputs is None else [module]
    content = {
        "peft_type": "IA3", "task_type": task_type, "base_model_name_or_path": base_model, "inference_mode": True,
        "target_modules": sorted(name[len(PREFIX) : -len(SUFFIX)] for name in tensors),
        "feedforward_modules": sorted(feedforward), "fan_in_fan_out": False, "modules_to_save": None,
    }  # fmt: skip
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.write(folder / WEIGHTS, {k: t.contiguous() for k, t in tensors.items()}, {"format": "pt"})
    with safetensors.replacing(folder / CONFIG) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def load(
    folder: str | Path, path_of: Callable[[str], str | None], *, dtype: torch.dtype | None = torch.float32
) -> dict[str, Ia3]:
    """Read the factors of a PEFT directory, tensors in ``dtype``, as in ``peft.load``.

    ``path_of`` returns the path of a Hugging Face module, or None if it is unknown. Raises ValueError that names the
    file, and the setting, module or tensor that cannot be read.
    """
    is_feedforward = _settings(Path(folder) / CONFIG)
    found = safetensors.header(inside(Path(folder) / WEIGHTS))
    out: dict[str, Ia3] = {}
    with tree.at(str(found.path)):
        expect(found.tensors, "got no tensors, wanted those of at least one module; the file is incomplete")
        for name, entry in found.tensors.items():
            known = name.startswith(PREFIX) and name.endswith(SUFFIX)
            expect(known, f"{name:.200}: got an unknown tensor, wanted {PREFIX}<module>{SUFFIX}")
            module = name[len(PREFIX) : -len(SUFFIX)]
            check_name(module)
            path, shape, is_input = path_of(module), tuple(entry.shape), is_feedforward(module)
            fault = (
                f"{module:.200}: got no path, or that of another module, wanted one of its own; is this adapter for "
            )
            expect(path is not None and path not in out, fault + "another model?")
            wanted = "[1 in], it is in feedforward_modules" if is_input else "[out 1], it is not in feedforward_modules"
            fits = len(shape) == 2 and shape[not is_input] == 1 and entry.dtype in FLOATS
            expect(fits, f"{name:.200}: got {entry.dtype} {shape}, wanted floats {wanted} of {CONFIG}")
            factors = cast(safetensors.read(found, name).flatten(), dtype)
            out[str(path)] = Ia3(inputs=factors) if is_input else Ia3(outputs=factors)
    return out


def _settings(path: Path) -> Callable[[str], bool]:
    """Read the settings; return the test for a module whose inputs are scaled, which is PEFT's."""
    names = values(path, READ, IGNORED)["feedforward_modules"] or []
    with tree.at(f"{path}: feedforward_modules"):
        return matcher(names) if isinstance(names, str) else lambda module: module.endswith(tuple(names))
