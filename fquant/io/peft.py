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
from ..packed_linear import Lora
from . import safetensors

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
FIELDS = {"a": ".lora_A.weight", "b": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}

# Settings that are read, with PEFT's defaults.
READ: dict[str, Any] = {
    "peft_type": None, "r": 8, "lora_alpha": 8, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False,
    "use_dora": False, "lora_dropout": 0.0, "target_modules": None, "init_lora_weights": True, "bias": "none",
    "exclude_modules": None, "layers_to_transform": None,
}  # fmt: skip
# Settings without effect on the results of a trained adapter.
IGNORED = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "layers_pattern", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
# Initialisations that keep the base weights; the others (pissa, olora, loftq, ...) train beside another base.
INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")


def save(
    folder: str | Path, adapters: dict[str, Lora], module_name: Callable[[str], str], base_model: str = ""
) -> None:
    """Write adapters as a PEFT directory, tensors in float32.

    ``module_name`` returns the Hugging Face module of a path; ``base_model`` is the name or folder of the base. Raises
    ValueError, before anything is written, if PEFT cannot express the adapters.
    """
    if not adapters:
        raise ValueError(f"{folder}: got no adapters, wanted at least one")
    tensors: dict[str, Tensor] = {}
    by_module: dict[str, Lora] = {}
    for path, lora in adapters.items():
        with tree.at(path):
            _check(lora)
            module = module_name(path)
            if "embed" in module.rpartition(".")[2]:
                raise ValueError(f"{module} is an embedding, whose adapters differ in PEFT; merge it instead")
            if module in by_module:
                raise ValueError(f"got the module {module} of another adapter, wanted its own; fix module_name")
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


def load(folder: str | Path, path_of: Callable[[str], str | None]) -> dict[str, Lora]:
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
        out: dict[str, Lora] = {}
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
    first = next(iter(by_module))
    shared = option(by_module[first])
    for module, lora in by_module.items():
        if (got := option(lora)) != shared:
            fix = "PEFT has one for all; save them as two adapters"
            raise ValueError(f"{module}: got {name} {got}, wanted {shared} as in {first}, {fix}")
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
    if not path.is_file():
        raise ValueError(f"{path}: got no such file, wanted that of a PEFT adapter; check the folder")
    with tree.at(str(path)):
        try:
            config = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"got no JSON ({error}), wanted the settings of an adapter; check the file") from error
        if not isinstance(config, dict):
            raise ValueError(f"got a JSON {type(config).__name__}, wanted an object; check the file")
        for key, x in config.items():
            if key not in READ and key not in IGNORED and x:
                raise ValueError(f"{key}: got {x!r:.80}, wanted it absent, null or false; it is not supported")
        config = {key: config.get(key, usual) for key, usual in READ.items()}
        for key, allowed in {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": INITIALISATIONS}.items():
            if config[key] not in allowed:
                raise ValueError(f"{key}: got {config[key]!r:.80}, wanted one of {allowed}; it is not supported")
        for key, (fits, wanted) in KINDS.items():
            if not fits(config[key]):
                raise ValueError(f"{key}: got {config[key]!r:.80}, wanted {wanted}; check the file")
        return config


def _modules(found: safetensors.Header) -> dict[str, dict[str, str]]:
    """Return the tensor names of each module by field."""
    modules: dict[str, dict[str, str]] = {}
    for name in found.tensors:
        for field, suffix in FIELDS.items():
            if name.startswith(PREFIX) and name.endswith(suffix):
                modules.setdefault(name[len(PREFIX) : -len(suffix)], {})[field] = name
                break
        else:
            raise ValueError(f"{name}: got an unknown tensor, wanted {PREFIX}<module>{'|'.join(FIELDS.values())}")
    if not modules:
        raise ValueError("got no tensors, wanted those of at least one module; the file is incomplete")
    return modules


def _check_targets(config: dict[str, Any], modules: dict[str, Any]) -> None:
    """Check that the modules of the tensors are those that the settings target, if the settings list them."""
    targets = config["target_modules"]
    if targets is None or targets == "all-linear":
        return
    if isinstance(targets, str):
        surplus, missing = [module for module in modules if not re.fullmatch(targets, module)], []
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
        if field not in names:
            raise ValueError(f"{PREFIX}{module}{FIELDS[field]}: got no such tensor, wanted one; the file is incomplete")
    if len(names) > len(wanted):
        raise ValueError(f"{names['magnitude']}: got a magnitude, wanted none, use_dora of {CONFIG} is false")
    rank = _resolve(config["rank_pattern"], config["r"], module)
    alpha = float(_resolve(config["alpha_pattern"], config["lora_alpha"], module))
    with tree.at(module):
        _check_shapes(rank, *(found.tensors[names[field]].shape if field in names else None for field in FIELDS))
    tensors = {field: safetensors.read(found, name) for field, name in names.items()}
    lora = Lora(**tensors, alpha=alpha, rank_stabilised=config["use_rslora"], dropout=float(config["lora_dropout"]))
    with tree.at(module):
        _check(lora)
    return lora


def _check(lora: Any) -> None:
    if not isinstance(lora, Lora):
        raise TypeError(f"got {type(lora).__name__}, wanted a Lora")
    tensors = [getattr(lora, field) for field in FIELDS]
    for field, x in zip(FIELDS, tensors, strict=True):
        if x is not None and x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{field}: got {x.dtype}, wanted float32, bfloat16 or float16")
    _check_shapes(lora.a.shape[0] if lora.a.ndim else 0, *(None if x is None else tuple(x.shape) for x in tensors))


def _check_shapes(rank: int, a: Any, b: Any, magnitude: Any) -> None:
    if not (len(a) == len(b) == 2 and rank == a[0] == b[1] and magnitude in (None, b[:1])):
        wanted = f"a [rank in], b [out rank], magnitude [out] or None, with rank {rank}"
        raise ValueError(f"got a {a}, b {b}, magnitude {magnitude}, wanted {wanted}")


def _compiles(pattern: str) -> bool:
    try:
        return bool(re.compile(pattern))
    except re.error:
        return False


_is_number = lambda x: type(x) in (int, float) and math.isfinite(x)
_is_rank = lambda x: type(x) is int and x > 0
_is_pattern = lambda x, fits: isinstance(x, dict) and all(map(_compiles, x)) and all(map(fits, x.values()))
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a number above 0"),
    "lora_alpha": (_is_number, "a number"),
    "rank_pattern": (lambda x: _is_pattern(x, _is_rank), "an object of ranks by regular expression"),
    "alpha_pattern": (lambda x: _is_pattern(x, _is_number), "an object of numbers by regular expression"),
    "use_rslora": (lambda x: type(x) is bool, "true or false"),
    "use_dora": (lambda x: type(x) is bool, "true or false"),
    "lora_dropout": (lambda x: _is_number(x) and 0 <= x < 1, "a number in [0, 1)"),
    "target_modules": (
        lambda x: x is None or (_compiles(x) if type(x) is str else type(x) is list and set(map(type, x)) <= {str}),
        "null, a regular expression or a list of strings",
    ),
}
