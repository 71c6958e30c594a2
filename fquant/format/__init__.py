"""Quantisation formats: the meaning of the codes of a quantised array, as frozen values.

A new format is a value, and a variation is ``dataclasses.replace(NF4, block=128)``. Double quantisation is a format
whose ``scale`` is another format.

Sources: NF4 and double quantisation, Dettmers et al. 2023 (QLoRA); INT8, the weight half of LLM.int8(), Dettmers et al.
2022. Sums of learned vectors: Babenko & Lempitsky 2014; of weights, Egiazarian et al. 2024 (AQLM). Integers with a zero
point: Jacob et al. 2018 (integer-arithmetic-only inference); GPTQ and AWQ store such. MXFP4: OCP Microscaling Formats
v1.0, 2023. FP8's E4M3: Micikevicius et al. 2022. The tables of values are in ``tables``.
"""

from .definition import BITS, BLOCKS, CODES, FORMER_NAMES, Format, Vectors, named, num_blocks, num_bytes
from .known import (
    AF4,
    AQ_2X8,
    AQ_3X8,
    DYNAMIC8,
    FORMATS,
    FP4,
    FP8,
    FP8_E4M3,
    FP8_E5M2,
    FP8_TENSOR,
    INT2,
    INT2_ZERO,
    INT3,
    INT3_ZERO,
    INT4,
    INT4_ZERO,
    INT8,
    INT8_GROUP,
    INT8_ROW,
    INT8_ROW_ZERO,
    INT8_TENSOR,
    MOMENT4,
    MOMENT4_UNSIGNED,
    MOMENT8,
    MOMENT8_UNSIGNED,
    MOMENT_FP8,
    MXFP4,
    MXFP8,
    NF4,
    NF4_DQ,
    NF4_INT8,
    NVFP4,
    SCALE_E4M3,
    SCALE_E8M0,
    TERNARY,
)  # fmt: skip
from .tables import E2M1, E4M3, E5M2, E8M0
from .text import parse, read

__all__ = [
    "AF4", "AQ_2X8", "AQ_3X8", "BITS", "BLOCKS", "CODES", "DYNAMIC8", "E2M1", "E4M3", "E5M2", "E8M0", "FORMATS",
    "FORMER_NAMES", "FP4", "FP8", "FP8_E4M3", "FP8_E5M2", "FP8_TENSOR", "INT2", "INT2_ZERO", "INT3", "INT3_ZERO",
    "INT4", "INT4_ZERO", "INT8", "INT8_GROUP", "INT8_ROW", "INT8_ROW_ZERO", "INT8_TENSOR", "MOMENT4",
    "MOMENT4_UNSIGNED", "MOMENT8", "MOMENT8_UNSIGNED", "MOMENT_FP8", "MXFP4", "MXFP8", "NF4", "NF4_DQ", "NF4_INT8",
    "NVFP4", "SCALE_E4M3", "SCALE_E8M0", "TERNARY", "Format", "Vectors", "named", "num_blocks", "num_bytes",
    "parse", "read",
]  # fmt: skip
