"""Full training: every weight of a base is trained, in bundles over the mesh (shard/trained/).

    python -m examples.qlora --train full --format none --model DIR --data FILE
    python -m examples.qlora --train full --format int8_row --model DIR --data FILE      # codes are the only copy

A run differs from one of adapters in its trained tree, which is the model: float32 masters, or the codes themselves of
a format of integers in blocks along rows. Each rank writes its part of it to checkpoints. Rank 0 publishes it whole, as
a folder for transformers in the dtypes of the base.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shard
from fquant import dequantize, lazy, tree
from fquant.quantized_training import weights
from fquant.quantized_training.weights import is_packed
from models import hf
from models.config import Config
from models.export.folder import copy_companions
from shard.trained import float_bundle

from ..common.command_line import DTYPES, parse_format
from ..common.model_folders import companions

if TYPE_CHECKING:
    from .options import Options

MODEL = "model"  # folder in that of a run
OF_ADAPTERS = (
    "rank", "alpha", "targets", "dropout", "dora", "rank_stabilised", "rank_pattern", "alpha_pattern", "adapter",
    "merge_aware", "dither",
)  # fmt: skip
WITH_REFERENCE = ("dpo", "kto")


def check(options: Options) -> None:
    """Raise ValueError for options of the other kind of training."""
    if options.train == "lora":
        if options.wire is not None:
            raise ValueError(f"--wire is {options.wire} with --train lora, whose base travels packed; leave it out")
        return
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name in OF_ADAPTERS:
        if getattr(options, name) != defaults[name]:
            raise ValueError(f"--{name.replace('_', '-')} with --train full, which has no adapters; leave it out")
    check_format(options.format, options.block, options.wire)
    if options.objective in WITH_REFERENCE:
        fault = f"--train full with --objective {options.objective}, whose reference is the base without adapters"
        raise ValueError(f"{fault}; use --objective orpo, or --train lora")
    if options.offload is not None:
        raise ValueError("--offload block with --train full, whose blocks stay on the device; leave it out")


def check_format(name: str, block: int | None, wire: str | None) -> None:
    """Raise ValueError for a --format whose codes cannot be trained, and for one of codes with --wire."""
    if (format := parse_format(name, block)) is None:
        return
    try:
        weights.check(format)
    except ValueError as error:
        raise ValueError(f"--train full with --format {name}: {error}, or none; or use --train lora") from None
    if wire is not None:
        raise ValueError(f"--wire is {wire} with --format {name}, whose weights travel as they are; leave one out")


def precision(options: Any) -> shard.Precision | None:
    """Return the dtypes of full training by the options ``train``, ``dtype`` and ``wire``, and None of adapters.

    A table and a head travel as they are, as in BitNet, whose tables are not quantised.
    """
    if options.train == "lora":
        return None
    wire = None if options.wire is None else shard.wire.WIRES[options.wire]
    return shard.Precision(DTYPES[options.dtype], wire=wire, dense=None if wire is None else "embed|final")


def check_base(options: Options, packed: Any) -> None:
    """Raise ValueError for a base with weights that cannot be trained in full."""
    if (dtypes := precision(options)) is not None:
        like = lazy.like(packed)
        try:
            tree.map_with_path(lambda _, x: weights.check_weight(x) if is_packed(x) else x, like, is_leaf=is_packed)
            float_bundle.master(tree.map(lambda x: () if is_packed(x) else x, like, is_leaf=is_packed), dtypes)
        except (TypeError, ValueError) as error:
            raise ValueError(f"--train full of {options.model}: {error}") from error


def write(out: Path, base: Path, cfg: Config, trained: Any) -> None:
    """Write the whole ``trained`` parameters as a folder for transformers, in the dtypes of the folder ``base``."""
    _, like = hf.lazy(base)
    cast = lambda t, like: t.to(like.dtype)
    fresh = out.with_name(f"{out.name}.new")  # so that a run that is killed has the former one
    shutil.rmtree(fresh, ignore_errors=True)
    hf.save(fresh, cfg, tree.map(cast, dequantize(trained), lazy.like(like)), extra=companions(base))
    copy_companions(base, fresh)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)
