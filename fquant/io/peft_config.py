"""The settings of a PEFT adapter, ``adapter_config.json``: read, checked, and written for given adapters.

In PEFT one rank and one alpha hold for all modules, and ``rank_pattern`` and ``alpha_pattern`` hold exceptions. Their
keys are regular expressions for the end of a module's name, and the first that fits counts. Dropout, rank stabilisation
and DoRA hold for the whole adapter. An unknown setting that may change the adapter's results raises.

Expressions of a file are matched by ``fquant.io.linear_regex``, so none takes long.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import tree
from ..packed_linear import Lora
from ..tree import expect
from .files.reading import inside, json_object
from .linear_regex import check_name, matcher
from .name_patterns import is_fixed, lookup
from .tree_json import Rule, check_values, one_of

CONFIG = "adapter_config.json"

# Settings without effect on the results of a trained adapter. fan_in_fan_out is about how the base stores a weight.
IGNORED = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "fan_in_fan_out", "inference_mode", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
# The order of parameters inside transformers' modules of experts. PEFT nests the adapters of one module in this order.
EXPERT_PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")

Targeted = Callable[[str], bool]


@dataclass(frozen=True)
class Settings:
    """The settings of an adapter, checked, and PEFT's rules for them as functions of a module's name."""

    given: dict[str, Any]  # the settings in READ, by name
    rank: Callable[[str], int]
    alpha: Callable[[str], float]
    is_targeted: Targeted


def values(path: Path, rules: Mapping[str, tuple[Any, Rule]], ignored: Collection[str]) -> dict[str, Any]:
    """Read the settings in ``rules``, their default and rule by name, from the file at ``path``.

    Raises ValueError that names the file and the setting, for one against its rule. So it does for one that is neither
    in ``rules`` nor ``ignored``, unless it is null, false or empty.
    """
    expect(inside(path).exists(), f"{path}: got no such file, wanted that of a PEFT adapter; check the folder")
    content = json_object(path, "the settings of an adapter")
    with tree.at(str(path)):
        for key, x in content.items():
            fault = f"{key:.80}: got {x!r:.80}, wanted it absent, null or false; it is not supported"
            expect(key in rules or key in ignored or not x, fault)
        given = {key: content.get(key, usual) for key, (usual, _) in rules.items()}
        check_values(given, {key: rule for key, (_, rule) in rules.items()})
        return given


def read(path: Path) -> Settings:
    """Read the settings of the file at ``path``; raise ValueError that names the file and the setting."""
    given = values(path, READ, IGNORED)
    with tree.at(str(path)):
        functions: dict[str, Any] = {}
        for key, name in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
            with tree.at(key):
                functions[key] = lookup(given[key], given[name])
        return Settings(given, functions["rank_pattern"], functions["alpha_pattern"], _targeted(given))


def check_targets(settings: Settings, modules: Collection[str]) -> None:
    """Check that the modules of the tensors are those that the settings target, if the settings list them."""
    targets, given = settings.given["target_modules"], settings.given
    if targets is None or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return
    for module in modules:
        fault = f"{module:.80}: got tensors of it, wanted none, target_modules of {CONFIG} does not have it"
        expect(settings.is_targeted(module), fault)
    narrowed = given["exclude_modules"] or given["modules_to_save"] or given["layers_to_transform"] is not None
    if isinstance(targets, list) and not narrowed:
        missing = set(targets).difference(*map(ends, modules))
        if missing:
            fault = "got no tensors, wanted some, it is in target_modules of"
            raise ValueError(f"{min(missing):.80}: {fault} {CONFIG}")


def is_saved_whole(settings: Settings, module: str) -> bool:
    """Return True if ``module`` is in ``modules_to_save``, or in such a module; PEFT compares ends of names."""
    names = tuple(settings.given["modules_to_save"] or ())
    return any(module.endswith(names, 0, i) for i in range(1, len(module) + 1) if module[i : i + 1] in ("", "."))


def text(by_module: dict[str, Lora], base_model: str, **others: Any) -> str:
    """Return the settings of adapters by their modules; ``others`` are settings besides.

    Raises ValueError if the adapters differ where PEFT has one setting for all.
    """
    whole = lambda x: int(x) if float(x).is_integer() else x
    rank, rank_pattern = _pattern({module: lora.a.shape[-2] for module, lora in by_module.items()})
    alpha, alpha_pattern = _pattern({module: whole(lora.alpha) for module, lora in by_module.items()})
    content = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "inference_mode": True,
        "bias": "none", "r": rank, "rank_pattern": rank_pattern, "lora_alpha": alpha, "alpha_pattern": alpha_pattern,
        "lora_dropout": _shared(by_module, "dropout", lambda x: x.dropout),
        "use_rslora": _shared(by_module, "rank_stabilised", lambda x: x.rank_stabilised),
        "use_dora": _shared(by_module, "DoRA", lambda x: x.magnitude is not None),
    }  # fmt: skip
    return json.dumps(content | others, indent=2, allow_nan=False) + "\n"


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
    value_of = lookup(pattern, usual)
    if any(value_of(name) != x for name, x in wanted.items()):
        pattern = {re.escape(name): wanted[name] for name in names}
    return usual, pattern


def _targeted(given: dict[str, Any]) -> Targeted:
    """Return PEFT's ``check_target_module_exists`` as a function of the name."""
    with tree.at("exclude_modules"):
        is_excluded = _chosen(given["exclude_modules"] or [])
    is_whole = _ends_in(given["modules_to_save"] or [], inside=True)
    with tree.at("target_modules"):
        is_chosen = _chosen(given["target_modules"] or [])
    targets, layers, pattern = given["target_modules"], given["layers_to_transform"], given["layers_pattern"] or []
    layers = [layers] if type(layers) is int else layers
    whole = set(targets) if isinstance(targets, list) else set()
    patterns = [pattern] if isinstance(pattern, str) else pattern
    with tree.at("layers_pattern"):
        for x in patterns:
            expect(is_fixed(x), f"got {x!r:.80}, wanted a name without repetitions and groups; list the names")
    rules = [re.compile(rf"(?:^|.*?\.){x}\.(\d+)\.") for x in patterns]

    def layer(name: str) -> int | None:
        if not rules:  # the first number that follows two parts or more, and is followed by another part
            return next((int(x) for x in name.split(".")[2:-1] if x.isdecimal()), None)
        found = next((found for rule in rules if (found := rule.match(name))), None)
        return int(found[1]) if found else None

    def is_targeted(name: str) -> bool:
        check_name(name)
        if is_excluded(name) or is_whole(name) or not is_chosen(name):
            return False
        return not layers or isinstance(targets, str) or name in whole or layer(name) in layers

    return is_targeted


def _chosen(names: str | list[str]) -> Targeted:
    return matcher(names) if isinstance(names, str) else _ends_in(names)


def _ends_in(names: Iterable[str], inside: bool = False) -> Targeted:
    """Return the test for a name that is one of ``names`` or ends in a dot and one; ``inside`` them is in them too."""
    wanted = set(names)

    def test(name: str) -> bool:
        parts = name.split(".")
        prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))] if inside else [name]
        return any(wanted & ends(prefix) for prefix in prefixes)

    return test


def ends(name: str) -> set[str]:
    """Return ``name`` and its ends after each dot."""
    return {name, *(name[i + 1 :] for i, c in enumerate(name) if c == ".")}


_is_names = lambda x: type(x) is list and set(map(type, x)) <= {str}
_is_number = lambda x: type(x) in (int, float) and abs(x) < 1e30
_is_rank = lambda x: type(x) is int and 0 < x < 1 << 31
_is_layers = lambda x: x is None or _is_rank_or_0(x) or (type(x) is list and all(map(_is_rank_or_0, x)))
_is_rank_or_0 = lambda x: type(x) is int and 0 <= x < 1 << 31
_is_pattern = lambda x, fits: isinstance(x, dict) and all(map(fits, x.values()))
_switch = (lambda x: type(x) is bool, "true or false")
_names = (lambda x: x is None or (_is_names(x) and len(x) <= 1000), "null or a list of up to 1000 strings")
_parts = (lambda x: x is None or type(x) is str or (_is_names(x) and len(x) <= 16), "null, a name or up to 16 names")
_targets = (lambda x: x is None or type(x) is str or _is_names(x), "null, a regular expression or a list of strings")
READ: dict[str, tuple[Any, Rule]] = {  # settings that are read: PEFT's default, and the values that are supported
    "peft_type": (None, one_of("LORA")),
    "bias": ("none", one_of("none", "all", "lora_only")),
    # The initialisations that keep the base weights; the others (pissa, olora, loftq, ...) train beside another base.
    "init_lora_weights": (True, one_of(True, False, "gaussian", "eva", "orthogonal")),
    "r": (8, (_is_rank, "a number above 0")),
    "lora_alpha": (8, (_is_number, "a number")),
    "rank_pattern": ({}, (lambda x: _is_pattern(x, _is_rank), "an object of ranks by regular expression")),
    "alpha_pattern": ({}, (lambda x: _is_pattern(x, _is_number), "an object of numbers by regular expression")),
    "use_rslora": (False, _switch),
    "use_dora": (False, _switch),
    "lora_dropout": (0.0, (lambda x: _is_number(x) and 0 <= x < 1, "a number in [0, 1)")),
    "target_modules": (None, _targets),
    "exclude_modules": (None, _targets),
    "layers_to_transform": (None, (_is_layers, "null, a layer's index or a list of them")),
    "layers_pattern": (None, _parts),
    "modules_to_save": (None, _names),
    "target_parameters": (None, _names),
    "ensure_weight_tying": (False, _switch),
}
