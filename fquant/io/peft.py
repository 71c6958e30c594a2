"""Adapters as a PEFT directory, written and read.

    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [rank in], .lora_B.weight [out rank],
                                 .lora_magnitude_vector [out]  (DoRA)
    adapter_config.json          rank, alpha and the names of the modules

``<module>`` is a name in the Hugging Face model ("model.layers.0.self_attn.q_proj"); adapters here have paths
("layers.0.q"). Both functions take the map between them as an argument.

In PEFT one rank and one alpha hold for all modules, and ``rank_pattern`` and ``alpha_pattern`` hold exceptions. Their
keys are regular expressions for the end of a module's name, and the first that fits counts. Dropout, rank stabilisation
and DoRA hold for the whole adapter. An unknown setting that may change the adapter's results raises.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..lora import Adapters, Lora
from ..packed import FLOATS
from ..tree import expect
from . import safetensors
from .tree_json import Rule, check_values, one_of, parse

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
FIELDS = {"a": ".lora_A.weight", "b": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}

# Settings without effect on the results of a trained adapter.
IGNORED = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "layers_pattern", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip


def save(folder: str | Path, adapters: Adapters, module_name: Callable[[str], str], base_model: str = "") -> None:
    """Write adapters as a PEFT directory, tensors in float32.

    ``module_name`` returns the Hugging Face module of a path; ``base_model`` is the name or folder of the base. Raises
    ValueError, before anything is written, if PEFT cannot express the adapters.
    """
    expect(adapters, f"{folder}: got no adapters, wanted at least one")
    tensors: dict[str, Tensor] = {}
    by_module: dict[str, Lora] = {}
    for path, lora in adapters.items():
        with tree.at(path):
            expect(isinstance(lora, Lora), f"got {type(lora).__name__}, wanted a Lora", TypeError)
            _check(lora.a.shape[0] if lora.a.ndim else 0, lora.a, lora.b, lora.magnitude)
            module = module_name(path)
            fault = f"{module} is an embedding, whose adapters differ in PEFT; merge it instead"
            expect("embed" not in module.rpartition(".")[2], fault)
            fault = f"got the module {module} of another adapter, wanted its own; fix module_name"
            expect(module not in by_module, fault)
        by_module[module] = lora
        for field, suffix in FIELDS.items():
            if (tensor := getattr(lora, field)) is not None:
                tensors[PREFIX + module + suffix] = tensor.detach().to(torch.float32)
    text = json.dumps(_config(by_module, base_model), indent=2, allow_nan=False) + "\n"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.write(folder / WEIGHTS, tensors, {"format": "pt"})
    with safetensors.replacing(folder / CONFIG) as file:
        file.write(text.encode())


def load(folder: str | Path, path_of: Callable[[str], str | None]) -> Adapters:
    """Read the adapters of a PEFT directory, tensors in the stored dtype.

    ``path_of`` returns the path of a Hugging Face module, or None if it is unknown. Raises ValueError that names the
    file, and the setting, module or tensor that cannot be read.
    """
    folder = Path(folder)
    config = _read_config(folder / CONFIG)
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise ValueError(f"{folder}: got adapter_model.bin, wanted {WEIGHTS}; save it with safe_serialization=True")
    found = safetensors.header(folder / WEIGHTS)
    with tree.at(str(found.path)):
        modules = _modules(found)
        _check_targets(config, modules)
        out: Adapters = {}
        for module in modules:
            path = path_of(module)
            if path is None or path in out:
                fault = "no path" if path is None else f"the path {path} of another module"
                raise ValueError(f"{module}: got {fault}, wanted one of its own; is this adapter for another model?")
            out[path] = _lora(found, module, modules[module], config)
    return out


def _config(by_module: dict[str, Lora], base_model: str) -> dict[str, Any]:
    whole = lambda x: int(x) if float(x).is_integer() else x
    rank, rank_pattern = _pattern({module: lora.a.shape[0] for module, lora in by_module.items()})
    alpha, alpha_pattern = _pattern({module: whole(lora.alpha) for module, lora in by_module.items()})
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "inference_mode": True,
        "bias": "none", "r": rank, "rank_pattern": rank_pattern, "lora_alpha": alpha, "alpha_pattern": alpha_pattern,
        "lora_dropout": _shared(by_module, "dropout", lambda x: x.dropout),
        "use_rslora": _shared(by_module, "rank_stabilised", lambda x: x.rank_stabilised),
        "use_dora": _shared(by_module, "DoRA", lambda x: x.magnitude is not None),
        "target_modules": sorted(by_module),
    }  # fmt: skip


def _shared(by_module: dict[str, Lora], name: str, option: Callable[[Lora], Any]) -> Any:
    """Return the value that all modules share; raise ValueError if they differ."""
    first, shared = next((module, option(lora)) for module, lora in by_module.items())
    for module, lora in by_module.items():
        got = f"{module}: got {name} {option(lora)}, wanted {shared} as in {first}"
        expect(option(lora) == shared, f"{got}, PEFT has one for all; save them as two adapters")
    return shared


def _pattern(wanted: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the commonest value, and the exceptions by module."""
    usual = Counter(wanted.values()).most_common(1)[0][0]
    # A name also fits longer names that end in it, and the first that fits counts, so the longest come first.
    names = sorted(wanted, key=lambda name: (-len(name), name))
    pattern = {re.escape(name): wanted[name] for name in names if wanted[name] != usual}
    if any(_resolve(pattern, usual, name) != x for name, x in wanted.items()):
        pattern = {re.escape(name): wanted[name] for name in names}
    return usual, pattern


def _resolve(pattern: dict[str, Any], usual: Any, module: str) -> Any:
    """Return the value of ``module`` by PEFT's rule."""
    return next((x for key, x in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), usual)


def _read_config(path: Path) -> dict[str, Any]:
    expect(path.is_file(), f"{path}: got no such file, wanted that of a PEFT adapter; check the folder")
    with tree.at(str(path)):
        given = parse(path.read_bytes(), "the settings of an adapter")
        for key, x in given.items():
            fault = f"{key}: got {x!r:.80}, wanted it absent, null or false; it is not supported"
            expect(key in READ or key in IGNORED or not x, fault)
        config = {key: given.get(key, usual) for key, (usual, _) in READ.items()}
        check_values(config, {key: rule for key, (_, rule) in READ.items()})
        return config


def _modules(found: safetensors.Header) -> dict[str, dict[str, str]]:
    """Return the tensor names of each module by field."""
    modules: dict[str, dict[str, str]] = {}
    for name in found.tensors:
        field = next((f for f, suffix in FIELDS.items() if name.startswith(PREFIX) and name.endswith(suffix)), "")
        expect(field, f"{name}: got an unknown tensor, wanted {PREFIX}<module>{'|'.join(FIELDS.values())}")
        modules.setdefault(name[len(PREFIX) : -len(FIELDS[field])], {})[field] = name
    expect(modules, "got no tensors, wanted those of at least one module; the file is incomplete")
    return modules


def _check_targets(config: dict[str, Any], modules: dict[str, Any]) -> None:
    """Check that the modules of the tensors are those that the settings target, if the settings list them."""
    targets, missing = config["target_modules"], []
    if targets is None or targets == "all-linear":
        return
    if isinstance(targets, str):
        surplus = [module for module in modules if not re.fullmatch(targets, module)]
    else:
        ends = {module: {module, *(module[i + 1 :] for i, c in enumerate(module) if c == ".")} for module in modules}
        surplus = [module for module in modules if not ends[module] & set(targets)]
        missing = sorted(set(targets).difference(*ends.values()))
    if surplus:
        raise ValueError(f"{surplus[0]}: got tensors of it, wanted none, target_modules of {CONFIG} does not have it")
    if missing and not config["exclude_modules"] and config["layers_to_transform"] is None:
        raise ValueError(f"{missing[0]}: got no tensors, wanted some, it is in target_modules of {CONFIG}")


def _lora(found: safetensors.Header, module: str, names: dict[str, str], config: dict[str, Any]) -> Lora:
    wanted = [field for field in FIELDS if field != "magnitude" or config["use_dora"]]
    for field in wanted:
        where = f"{PREFIX}{module}{FIELDS[field]}"
        expect(field in names, f"{where}: got no such tensor, wanted one; the file is incomplete")
    if len(names) > len(wanted):
        raise ValueError(f"{names['magnitude']}: got a magnitude, wanted none, use_dora of {CONFIG} is false")
    rank = _resolve(config["rank_pattern"], config["r"], module)
    alpha = float(_resolve(config["alpha_pattern"], config["lora_alpha"], module))
    with tree.at(module):
        _check(rank, *(found.tensors[names[field]] if field in names else None for field in FIELDS))
    tensors = {field: safetensors.read(found, name) for field, name in names.items()}
    return Lora(**tensors, alpha=alpha, rank_stabilised=config["use_rslora"], dropout=float(config["lora_dropout"]))


def _check(rank: int, a: Any, b: Any, magnitude: Any) -> None:
    """Check the dtypes and shapes of the tensors of a Lora, or of their entries in a file."""
    given = {field: x for field, x in zip(FIELDS, (a, b, magnitude), strict=True) if x is not None}
    for field, x in given.items():
        expect(x.dtype in FLOATS, f"{field}: got {x.dtype}, wanted float32, bfloat16 or float16", TypeError)
    a, b, magnitude = (tuple(given[field].shape) if field in given else None for field in FIELDS)
    fits = a and b and len(a) == len(b) == 2 and rank == a[0] == b[1] and magnitude in (None, b[:1])
    wanted = f"a [rank in], b [out rank], magnitude [out] or None, with rank {rank}"
    expect(fits, f"got a {a}, b {b}, magnitude {magnitude}, wanted {wanted}")


def _compiles(pattern: str) -> bool:
    try:
        return bool(re.compile(pattern))
    except re.error:
        return False


_is_names = lambda x: type(x) is list and set(map(type, x)) <= {str}
_is_targets = lambda x: x is None or (_compiles(x) if type(x) is str else _is_names(x))
_is_number = lambda x: type(x) in (int, float) and math.isfinite(x)
_is_rank = lambda x: type(x) is int and x > 0
_is_pattern = lambda x, fits: isinstance(x, dict) and all(map(_compiles, x)) and all(map(fits, x.values()))
_switch, _anything = (lambda x: type(x) is bool, "true or false"), (lambda x: True, "anything")
READ: dict[str, tuple[Any, Rule]] = {  # settings that are read: PEFT's default, and the values that are supported
    "peft_type": (None, one_of("LORA")),
    "bias": ("none", one_of("none")),
    # The initialisations that keep the base weights; the others (pissa, olora, loftq, ...) train beside another base.
    "init_lora_weights": (True, one_of(True, False, "gaussian", "eva", "orthogonal")),
    "r": (8, (_is_rank, "a number above 0")),
    "lora_alpha": (8, (_is_number, "a number")),
    "rank_pattern": ({}, (lambda x: _is_pattern(x, _is_rank), "an object of ranks by regular expression")),
    "alpha_pattern": ({}, (lambda x: _is_pattern(x, _is_number), "an object of numbers by regular expression")),
    "use_rslora": (False, _switch),
    "use_dora": (False, _switch),
    "lora_dropout": (0.0, (lambda x: _is_number(x) and 0 <= x < 1, "a number in [0, 1)")),
    "target_modules": (None, (_is_targets, "null, a regular expression or a list of strings")),
    "exclude_modules": (None, _anything),
    "layers_to_transform": (None, _anything),
}
