"""Quantisation formats: the meaning of the codes of a quantised array, as frozen values.

A new format is a value, and a variation is ``dataclasses.replace(NF4, block=128)``. Double quantisation is a format
whose ``scale`` is another format.

Sources: NF4 and double quantisation, Dettmers et al. 2023 (QLoRA); INT8, the weight half of LLM.int8(), Dettmers et al.
2022. Sums of learned vectors: Babenko & Lempitsky 2014; of weights, Egiazarian et al. 2024 (AQLM). Integers with a zero
point: Jacob et al. 2018 (integer-arithmetic-only inference); GPTQ and AWQ store such. MXFP4: OCP Microscaling Formats
v1.0, 2023. FP8's E4M3: Micikevicius et al. 2022. The tables of values are in ``tables``.
"""

from .definition import BLOCKS, CODES, FORMER_NAMES, Format, Vectors, named, num_blocks, num_bytes
from .known import (
    AQ_2X8,
    AQ_3X8,
    DYNAMIC8,
    FORMATS,
    FP4,
    FP8,
    INT4,
    INT4_ZERO,
    INT8,
    MOMENT4,
    MOMENT4_UNSIGNED,
    MOMENT8,
    MOMENT8_UNSIGNED,
    MOMENT_FP8,
    MXFP4,
    NF4,
    NF4_DQ,
)  # fmt: skip
from .tables import E2M1, E4M3
from .text import parse, read

__all__ = [
    "AQ_2X8", "AQ_3X8", "BLOCKS", "CODES", "DYNAMIC8", "E2M1", "E4M3", "FORMATS", "FORMER_NAMES", "FP4", "FP8", "INT4",
    "INT4_ZERO", "INT8", "MOMENT4", "MOMENT4_UNSIGNED", "MOMENT8", "MOMENT8_UNSIGNED", "MOMENT_FP8", "MXFP4", "NF4",
    "NF4_DQ", "Format", "Vectors", "named", "num_blocks", "num_bytes", "parse", "read",
]  # fmt: skip
