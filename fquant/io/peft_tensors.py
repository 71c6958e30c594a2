"""The tensors of a PEFT adapter: their names and layouts in the file, which :mod:`fquant.io.peft` lists."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..packed import FLOATS
from ..packed_linear import Lora
from ..tree import expect
from . import safetensors
from .linear_regex import check_name
from .peft_config import CONFIG, EXPERT_PARAMETERS, Settings, ends, is_saved_whole

PREFIX = "base_model.model."
FIELDS = {"a": ".lora_A.weight", "b": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}
TABLE_FIELDS = {"b": ".lora_embedding_A", "a": ".lora_embedding_B"}  # both transposed
INNER = ".base_layer"
SAVED_BESIDE = ("embed_tokens", "lm_head")  # whose whole weights PEFT may write without naming them in the settings

UNKNOWN = "got a table, wanted to know if a head shares it; pass tied, which is hf.tied_modules(cfg) for a decoder"

Modules = dict[tuple[str, int], dict[str, str]]  # (module, times it is inside .base_layer) -> suffix -> tensor


def sorted_names(found: safetensors.Header, settings: Settings) -> tuple[Modules, list[str]]:
    """Return the tensor names of each module by suffix, and the names of whole tensors."""
    suffixes, modules, rest = (*FIELDS.values(), *TABLE_FIELDS.values()), Modules(), []
    for name in found.tensors:
        check_name(name)
        suffix = next((x for x in suffixes if name.startswith(PREFIX) and name.endswith(x)), None)
        if suffix is None:
            rest.append(name)
            continue
        module, depth = name[len(PREFIX) : -len(suffix)], 0
        while module.endswith(INNER):
            module, depth = module.removesuffix(INNER), depth + 1
        modules.setdefault((module, depth), {})[suffix] = name
    expect(modules, "got no tensors, wanted those of at least one module; the file is incomplete")
    given, adapted = settings.given, {module for module, _ in modules}
    kinds = [*suffixes, *([".bias"] if given["bias"] != "none" else [])]
    # PEFT repeats the bias of a module that is saved in full under two names of its own.
    own = lambda name: re.sub(r"\.(modules_to_save|original_module)\.bias$", ".bias", name)
    rest = [name for name in rest if own(name) == name or own(name) not in found.tensors]
    for name in rest:
        module, _, kind = name[len(PREFIX) :].rpartition(".")
        module, inner = module.removesuffix(INNER), module.endswith(INNER)
        is_bias = kind == "bias" and (given["bias"] == "all" or (given["bias"] == "lora_only" and module in adapted))
        is_table = kind == "weight" and module.rpartition(".")[2] in SAVED_BESIDE and (module in adapted) == inner
        known = name.startswith(PREFIX) and (is_bias or is_table or is_saved_whole(settings, module))
        expect(known, f"{name:.200}: got an unknown tensor, wanted {PREFIX}<module>{'|'.join(kinds)}")
    for saved in given["modules_to_save"] or []:
        fault = f"{saved:.200}: got no tensors, wanted some, it is in modules_to_save of {CONFIG}"
        expect(any(f"{saved}." in name for name in rest), fault)
    return modules, rest


def without_heads(
    found: safetensors.Header, settings: Settings, modules: Modules, whole: list[str], tied: Mapping[str, str] | None
) -> tuple[Modules, list[str]]:
    """Return the names but for those of heads that share a table, once both hold the same; else raise ValueError."""
    tables = {module for module, names in modules.items() if not names.keys().isdisjoint(TABLE_FIELDS.values())}
    modules, whole = dict(modules), list(whole)
    for name in [*(module for module, _ in tables), *(name for name in whole if name.endswith("embed_tokens.weight"))]:
        expect(tied is not None, f"{name:.200}: {UNKNOWN}")
    for table, head in (tied or {}).items():
        pair = f"{table} and {head} share a matrix here"
        fix = "train with ensure_weight_tying, or untie the model"
        there = [module for module in (table, head) if (module, 0) in modules]
        expect(len(there) != 1, f"{''.join(there)}: got an adapter of it alone, wanted one of both; {pair}: {fix}")
        if there:
            first, second = (read_lora(found, module, modules[module, 0], settings) for module in there)
            same = first.a.equal(second.a) and first.b.equal(second.b)
            same = same and _static(settings, table) == _static(settings, head)
            expect(same, f"{head}: got another adapter than that of {table}, wanted the same; {pair}: {fix}")
            del modules[head, 0]
        for inner in ("", INNER):
            names = [f"{PREFIX}{module}{inner}.weight" for module in (table, head)]
            there = [name for name in names if name in whole]
            expect(len(there) != 1, f"{''.join(there)}: got one whole tensor, wanted one of both; {pair}: {fix}")
            if there:
                same = safetensors.read(found, names[0]).equal(safetensors.read(found, names[1]))
                expect(same, f"{names[1]}: got another tensor than {names[0]}, wanted the same; {pair}: {fix}")
                whole.remove(names[1])
    return modules, whole


def parameters_of(modules: Modules, settings: Settings) -> dict[str, list[str]]:
    """Return the parameters that are adapted of each module, the outermost first."""
    out: dict[str, list[str]] = {}
    wanted: dict[str, set[str]] = {}  # by the end of the module's name
    for name in settings.given["target_parameters"] or []:
        wanted.setdefault(name.rpartition(".")[0], set()).add(name.rpartition(".")[2])
    for module, depth in Counter(module for module, _ in modules).items():
        fault = f"{module:.200}: got {depth} adapters with one inside another, wanted no {INNER} left out"
        expect(all((module, i) in modules for i in range(depth)), fault)
        names = sorted({x for end in ends(module) for x in wanted.get(end, ())})
        if not names or (depth == 1 and settings.given["target_modules"] and settings.is_targeted(module)):
            expect(depth == 1, f"{module:.200}: got {depth} adapters, wanted 1")
            continue
        expect(len(names) == depth, f"{module:.200}: got {depth} adapters, wanted those of {', '.join(names):.80}")
        if depth > 1:
            fault = f"{module:.200}: got the parameters {', '.join(names):.80}, whose order is unknown"
            expect(set(names) <= set(EXPERT_PARAMETERS), f"{fault}; wanted {', '.join(EXPERT_PARAMETERS)}")
            names.sort(key=EXPERT_PARAMETERS.index, reverse=True)
        out[module] = names
    return out


def read_lora(found: safetensors.Header, module: str, names: dict[str, str], settings: Settings) -> Lora:
    """Read the adapter of a linear weight or of a table, from the names of its tensors by suffix."""
    is_table, dora = not names.keys().isdisjoint(TABLE_FIELDS.values()), settings.given["use_dora"]
    fields = TABLE_FIELDS if is_table else {k: x for k, x in FIELDS.items() if k != "magnitude" or dora}
    if is_table and dora:
        fault = "got DoRA for a table, whose magnitudes are of columns, wanted none"
        raise ValueError(f"{module:.200}: {fault}; merge it with PEFT")
    for suffix in fields.values():
        where = f"{PREFIX}{module:.200}{suffix}"
        expect(suffix in names, f"{where}: got no such tensor, wanted one; the file is incomplete")
    for suffix in names.keys() - fields.values():
        kind = "magnitude" if suffix == FIELDS["magnitude"] else "tensor"
        reasons = {"magnitude": f"use_dora of {CONFIG} is false", "tensor": "a module is linear or an embedding"}
        raise ValueError(f"{names[suffix]:.200}: got a {kind}, wanted none, {reasons[kind]}")
    entries = {field: found.tensors[names[suffix]] for field, suffix in fields.items()}
    if is_table:
        entries = {field: replace(x, shape=tuple(x.shape)[::-1]) for field, x in entries.items()}
    a, b, magnitude = (entries.get(field) for field in FIELDS)
    with tree.at(f"{module:.200}"):
        check_shapes(settings.rank(module), a, b, magnitude)
    tensors = {field: safetensors.read(found, names[suffix]) for field, suffix in fields.items()}
    if is_table:
        tensors = {field: x.mT.contiguous() for field, x in tensors.items()}
    return Lora(**tensors, **_static(settings, module))


def read_stack(
    found: safetensors.Header, module: str, parameter: str, names: dict[str, str], settings: Settings
) -> Lora:
    """Read the adapters of the members of one parameter [E out in], or of a matrix."""
    with tree.at(f"{parameter:.200}"):
        given = settings.given
        expect(not given["use_dora"] and not given["lora_dropout"], "got DoRA or dropout, wanted neither, as in PEFT")
        fault = f"got {', '.join(names):.80}, wanted {FIELDS['a']} and {FIELDS['b']}; the file is incomplete"
        expect(names.keys() == {FIELDS["a"], FIELDS["b"]}, fault)
        rank, a, b = settings.rank(parameter), *(found.tensors[names[FIELDS[field]]] for field in "ab")
        whole = len(a.shape) == 2 and a.shape[0] > 0 and a.shape[0] % rank == 0
        check_shapes(a.shape[0] if whole else rank, a, b, None)
        n = a.shape[0] // rank
    a, b = (safetensors.read(found, names[FIELDS[field]]) for field in "ab")
    if n > 1:
        a, b = a.reshape(n, rank, a.shape[1]), b.reshape(b.shape[0], rank, n).permute(2, 0, 1).contiguous()
    return Lora(a, b, **_static(settings, parameter))


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Return a tree of tensors that were read in ``dtype``; None keeps the stored dtypes."""
    fault = f"dtype: got {dtype}, wanted float32, bfloat16, float16, or None for the stored dtypes"
    expect(dtype is None or dtype in FLOATS, fault, TypeError)
    return tree.map(lambda t: t.to(dtype or t.dtype), x)


def _static(settings: Settings, module: str) -> dict[str, Any]:
    given = settings.given
    static = {"rank_stabilised": given["use_rslora"], "dropout": float(given["lora_dropout"])}
    return static | {"alpha": float(settings.alpha(module))}


def unstacked(by_module: dict[str, Lora]) -> dict[str, Tensor]:
    """Return the tensors of stacks by their names in PEFT, nested in the order of EXPERT_PARAMETERS."""
    owners: dict[str, list[str]] = {}
    for module in by_module:
        owner, _, parameter = module.rpartition(".")
        owners.setdefault(owner, []).append(parameter)
    out: dict[str, Tensor] = {}
    for owner, parameters in owners.items():
        if len(parameters) > 1:
            fault = f"{owner}: got stacks of {', '.join(parameters)}, whose order in PEFT is unknown"
            expect(set(parameters) <= set(EXPERT_PARAMETERS), f"{fault}; wanted {', '.join(EXPERT_PARAMETERS)}")
            parameters.sort(key=EXPERT_PARAMETERS.index, reverse=True)
        for depth, parameter in enumerate(parameters):
            lora, place = by_module[f"{owner}.{parameter}"], PREFIX + owner + INNER * depth
            a, b = (t.detach().to(torch.float32) for t in (lora.a, lora.b))
            out[place + FIELDS["a"]] = a.flatten(0, 1).contiguous()
            out[place + FIELDS["b"]] = b.permute(1, 2, 0).flatten(1).contiguous()
    return out


def check_shapes(rank: int, a: Any, b: Any, magnitude: Any, in_file: bool = True) -> None:
    """Check the dtypes and shapes of the tensors of a Lora, or of their entries in a file, which has no stacks."""
    given = {field: x for field, x in zip(FIELDS, (a, b, magnitude), strict=True) if x is not None}
    error = ValueError if in_file else TypeError
    for field, x in given.items():
        expect(x.dtype in FLOATS, f"{field}: got {x.dtype}, wanted float32, bfloat16 or float16", error)
    a, b, magnitude = (tuple(given[field].shape) if field in given else None for field in FIELDS)
    dims = (2,) if in_file else (2, 3)
    fits = a and b and len(a) == len(b) in dims and rank == a[-2] == b[-1] and a[:-2] == b[:-2]
    wanted = f"a [rank in], b [out rank], magnitude [out] or None, with rank {rank}"
    expect(fits and magnitude in (None, b and b[-2:-1]), f"got a {a}, b {b}, magnitude {magnitude}, wanted {wanted}")
