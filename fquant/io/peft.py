"""Adapters as a PEFT directory, written and read.

    adapter_config.json          the settings: see fquant.io.peft_config
    adapter_model.safetensors    the tensors, under base_model.model.<module>

    .lora_A.weight [rank in], .lora_B.weight [out rank]      of a linear weight [out in]
    .lora_magnitude_vector [out]                             DoRA's
    .lora_embedding_A [rank vocab], .lora_embedding_B [dim rank]     of a table [vocab dim]: bᵀ and aᵀ
    .lora_A.weight [E·rank in], .lora_B.weight [out rank·E]  of a parameter [E out in] of experts (target_parameters),
                                                             in .base_layer for all but the last parameter
    .weight, .bias, .base_layer.weight, .base_layer.bias     whole tensors (modules_to_save, bias)

``<module>`` is a name in the Hugging Face model ("model.layers.0.self_attn.q_proj"); adapters here have paths
("layers.0.q"). All functions take the map between them as an argument. The module of an expert's parameter is its whole
name, "model.layers.0.mlp.experts.down_proj".

A head that shares the table of tokens is adapted with it here. In PEFT it has tensors of its own. So they are written
for both, with ``ensure_weight_tying``, and read if both are the same; otherwise PEFT computes something else, and they
are refused. The argument ``tied`` says which head shares which table: ``{"model.embed_tokens": "lm_head"}``, or ``{}``.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..lora import Adapters, Lora
from ..packed import FLOATS
from ..tree import expect
from . import peft_config, peft_tensors, safetensors
from .files.reading import inside
from .peft_config import CONFIG
from .peft_tensors import FIELDS, INNER, PREFIX, SAVED_BESIDE, TABLE_FIELDS, UNKNOWN, cast, check_shapes, unstacked

WEIGHTS = "adapter_model.safetensors"


def save(
    folder: str | Path, adapters: Adapters, module_name: Callable[[str], str], base_model: str = "", *,
    embeddings: Collection[str] = ("embed",), weights: Mapping[str, Tensor] | None = None,
    tied: Mapping[str, str] | None = None, task_type: str | None = "CAUSAL_LM",
) -> None:  # fmt: skip
    """Write adapters as a PEFT directory, tensors in float32.

    ``module_name`` returns the Hugging Face module of a path, for a decoder ``partial(hf.module_name, cfg=cfg)``.
    ``base_model`` is the name or folder of the base. ``embeddings`` are the paths of tables. ``weights`` are whole
    tensors by path, in their own dtype: of modules that were trained in full, and of biases, whose path is that of the
    weight and ``_bias``. ``tied`` has the modules of heads by that of the table that they share (``hf.tied_modules``);
    it must be given for a table. ``task_type`` selects PEFT's class; None, its plain one, is right for an encoder.
    Raises ValueError, before anything is written, if PEFT cannot express the adapters.
    """
    expect(adapters, f"{folder}: got no adapters, wanted at least one")
    tensors: dict[str, Tensor] = {}
    by_module: dict[str, Lora] = {}
    stacked: list[str] = []
    heads: list[str] = []  # that PEFT adapts with their tables; of other names it knows no tables
    for path, lora in adapters.items():
        with tree.at(path):
            expect(isinstance(lora, Lora), f"got {type(lora).__name__}, wanted a Lora", TypeError)
            check_shapes(lora.a.shape[-2] if lora.a.ndim > 1 else 0, lora.a, lora.b, lora.magnitude, in_file=False)
            module = module_name(path)
            expect(
                module not in by_module, f"got the module {module} of another adapter, wanted its own; fix module_name"
            )
            by_module[module] = lora
            if lora.a.ndim == 3:
                fault = "got dropout or DoRA for a stack of weights, wanted neither; PEFT has none for them"
                expect(lora.dropout == 0 and lora.magnitude is None, fault)
                stacked.append(module)
                continue
            is_table = path in embeddings
            fault = f"{module} is an embedding; name the path {path} in embeddings, whose adapters differ in PEFT"
            expect(is_table or "embed" not in module.rpartition(".")[2], fault)
            expect(not is_table or lora.magnitude is None, "got DoRA for a table, wanted none; merge it instead")
            expect(not is_table or tied is not None, UNKNOWN)
        head = (tied or {}).get(module) if is_table else None
        for field, suffix in (TABLE_FIELDS if is_table else FIELDS).items():
            if (tensor := getattr(lora, field)) is not None:
                tensor = tensor.detach().to(torch.float32)
                tensors[PREFIX + module + suffix] = tensor.mT.contiguous() if is_table else tensor
                tensors |= {PREFIX + head + FIELDS[field]: tensor} if head else {}
        if head:
            by_module[head] = lora
            heads += [head] if module.rpartition(".")[2] in SAVED_BESIDE else []
    tensors |= unstacked({module: by_module[module] for module in stacked})
    whole, others = _whole(weights or {}, module_name, by_module, tied)
    others["target_modules"] = sorted(set(by_module).difference(stacked, heads))
    others |= {"ensure_weight_tying": True} if heads else {}
    others |= {"target_parameters": sorted(stacked)} if stacked else {}
    settings = peft_config.text(by_module, base_model, task_type=task_type, **others)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.write(folder / WEIGHTS, tensors | whole, {"format": "pt"})
    with safetensors.replacing(folder / CONFIG) as file:
        file.write(settings.encode())


def load(
    folder: str | Path, path_of: Callable[[str], str | None], tied: Mapping[str, str] | None = None, *,
    dtype: torch.dtype | None = torch.float32,
) -> Adapters:  # fmt: skip
    """Read the adapters of a PEFT directory, tensors in ``dtype``; None keeps the stored dtypes.

    Adapters compute in their dtype, in which float16 overflows at 65504. So the default is PEFT's, which casts stored
    float16 and bf16 to float32 (``autocast_adapter_dtype``). ``path_of`` returns the path of a Hugging Face module, or
    None if it is unknown. For a decoder it is ``partial(hf.path_of, cfg=cfg)``. ``tied`` is that of :func:`save`.

    Raises ValueError that names the file, and the setting, module or tensor that cannot be read. So it does for whole
    weights, see :func:`load_all`. Raises TypeError for another ``dtype`` than float32, bfloat16 and float16.
    """
    found, adapters, whole = _open(Path(folder), path_of, tied, dtype)
    for name in whole:
        fault = "got a whole tensor, wanted adapters alone; call load_all and lora.replace_weights"
        raise ValueError(f"{found.path}: {name:.200}: {fault}")
    return adapters


def load_all(
    folder: str | Path,
    path_of: Callable[[str], str | None],
    tensor_path: Callable[[str], str | None] | None = None,
    tied: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = torch.float32,
) -> tuple[Adapters, dict[str, Tensor]]:
    """Read the adapters, and the whole weights and biases by path, for :func:`fquant.lora.replace_weights`.

    The adapters have ``dtype``, as in :func:`load`; whole weights have the stored dtypes, because the base casts them.
    ``tensor_path`` returns the path of a tensor of the Hugging Face model. By default that is the module's path for
    ``.weight``, and that path and ``_bias`` for ``.bias``. Raises ValueError as :func:`load` does.
    """
    found, adapters, whole = _open(Path(folder), path_of, tied, dtype)
    out: dict[str, Tensor] = {}
    with tree.at(str(found.path)):
        for name in whole:
            plain = name[len(PREFIX) :].replace(INNER + ".", ".")
            module, _, kind = plain.rpartition(".")
            path = tensor_path(plain) if tensor_path else path_of(module)
            if not tensor_path and path is not None:
                path = {"weight": path, "bias": f"{path}_bias"}.get(kind)
            fault = f"{name:.200}: got no path, or that of another tensor, wanted its own; is it for another model?"
            expect(path is not None and path not in out, fault)
            out[str(path)] = safetensors.read(found, name)
    return adapters, out


def _open(
    folder: Path, path_of: Callable[[str], str | None], tied: Mapping[str, str] | None, dtype: torch.dtype | None
) -> tuple[safetensors.Header, Adapters, list[str]]:
    """Return the header, the adapters, and the names of whole tensors."""
    settings = peft_config.read(folder / CONFIG)
    if not inside(folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise ValueError(f"{folder}: got adapter_model.bin, wanted {WEIGHTS}; save it with safe_serialization=True")
    found = safetensors.header(inside(folder / WEIGHTS))
    with tree.at(str(found.path)):
        modules, whole = peft_tensors.sorted_names(found, settings)
        parameters = peft_tensors.parameters_of(modules, settings)
        untargeted = {*parameters, *((tied or {}).values() if settings.given["ensure_weight_tying"] else ())}
        peft_config.check_targets(settings, [module for module, _ in modules if module not in untargeted])
        modules, whole = peft_tensors.without_heads(found, settings, modules, whole, tied)
        out: Adapters = {}
        for (module, depth), names in modules.items():
            name, lora = module, None
            if module in parameters:
                parameter = parameters[module][depth]
                name = module if parameter == "weight" else f"{module}.{parameter}"
                lora = peft_tensors.read_stack(found, module, f"{module}.{parameter}", names, settings)
            path = path_of(name)
            fault = "no path" if path is None else f"the path {path} of another module"
            fault = f"{name:.200}: got {fault}, wanted one of its own; is this adapter for another model?"
            expect(path is not None and path not in out, fault)
            lora = lora or peft_tensors.read_lora(found, module, names, settings)
            out[str(path)] = cast(lora, dtype)
    return found, out, whole


def _whole(
    weights: Mapping[str, Tensor],
    module_name: Callable[[str], str],
    by_module: Mapping[str, Any],
    tied: Mapping[str, str] | None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the whole tensors by their names in PEFT, and the settings that name them."""
    out: dict[str, Tensor] = {}
    modules, biases = [], []
    others: dict[str, Any] = {}
    for path, tensor in weights.items():
        with tree.at(path):
            expect(isinstance(tensor, Tensor), f"got {type(tensor).__name__}, wanted a tensor", TypeError)
            expect(tensor.dtype in FLOATS, f"got {tensor.dtype}, wanted float32, bfloat16 or float16", TypeError)
            if is_bias := path.endswith("_bias"):
                module = module_name(path.removesuffix("_bias"))
                biases.append(module)
            else:
                module = module_name(path)
                fault = f"got the weight of {module}, which has an adapter, wanted one of them; merge them"
                expect(module not in by_module or module.rpartition(".")[2] in SAVED_BESIDE, fault)
                modules += [] if module in by_module else [module]
                expect(tied is not None or "embed" not in module.rpartition(".")[2], UNKNOWN)
            inner = INNER if module in by_module else ""
            if not is_bias and (head := (tied or {}).get(module)):
                out[f"{PREFIX}{head}{inner}.weight"] = tensor.detach().contiguous()
                others["ensure_weight_tying"] = True
            out[f"{PREFIX}{module}{inner}.{'bias' if is_bias else 'weight'}"] = tensor.detach().contiguous()
    alone = [module for module in biases if module not in modules]
    others |= {"modules_to_save": sorted(modules)} if modules else {}
    if alone:
        others["bias"] = "lora_only" if set(alone) <= by_module.keys() else "all"
    return out, others
