"""The formats that have names."""

from dataclasses import replace

from .definition import Format, Vectors, named
from .tables import ABNORMAL4, E2M1, E4M3, E5M2, E8M0, FP4_VALUES, NORMAL4, SIXTEENTHS, dynamic_map, integers

# Scales of scales. The first two have one for each 4096, which are equal or 1, so that kernels decode them.
DYNAMIC8 = Format("dynamic8", bits=8, block=256, table=dynamic_map(), flat=True, center=True)
SCALE_E4M3 = Format("scale_e4m3", bits=8, block=4096, table=E4M3, flat=True, shared=True)
SCALE_E8M0 = Format("scale_e8m0", bits=8, block=4096, table=E8M0, flat=True)

NF4 = Format("nf4", bits=4, block=64, table=NORMAL4)
NF4_DQ = replace(NF4, name="nf4_dq", scale=DYNAMIC8)
NF4_INT8 = replace(NF4, name="nf4_int8", table=tuple(round(127 * x) / 127 for x in NORMAL4))  # the codes of NF4
FP4 = Format("fp4", bits=4, block=64, table=FP4_VALUES)
AF4 = Format("af4", bits=4, block=64, table=ABNORMAL4)

INT8 = Format("int8", bits=8, block=None)  # as LLM.int8(), which rounds to float16 first
INT8_ROW = Format("int8_row", bits=8, block=None, table=integers(-128, 127), unit=127.0)
INT8_ROW_ZERO = Format("int8_row_zero", bits=8, block=None, table=integers(0, 255), zero=True)
INT8_GROUP = replace(INT8_ROW, name="int8_group", block=128)
INT8_TENSOR = replace(INT8_ROW, name="int8_tensor", shared=True)
INT4 = Format("int4", bits=4, block=128, table=integers(-8, 7))
INT4_ZERO = Format("int4_zero", bits=4, block=128, table=integers(0, 15), zero=True)
INT3 = Format("int3", bits=3, block=64, table=integers(-4, 3), unit=3.5)
INT3_ZERO = Format("int3_zero", bits=3, block=64, table=integers(0, 7), zero=True)
INT2 = Format("int2", bits=2, block=64, table=integers(-2, 1), unit=1.5)
INT2_ZERO = Format("int2_zero", bits=2, block=64, table=integers(0, 3), zero=True)
TERNARY = Format("ternary", bits=2, block=None, table=(-1.0, 0.0, 1.0, float("nan")), shared=True, mean=True)

FP8 = Format("fp8", bits=8, block=128, table=E4M3)
FP8_E4M3 = replace(FP8, name="fp8_e4m3", block=None)
FP8_E5M2 = Format("fp8_e5m2", bits=8, block=None, table=E5M2)
FP8_TENSOR = replace(FP8_E4M3, name="fp8_tensor", shared=True)
MXFP8 = Format("mxfp8", bits=8, block=32, table=E4M3, scale=SCALE_E8M0, power=True)
MXFP4 = Format("mxfp4", bits=4, block=32, table=E2M1, scale=SCALE_E8M0, power=True)
NVFP4 = Format("nvfp4", bits=4, block=16, table=E2M1, scale=SCALE_E4M3)

AQ_2X8 = Format("aq_2x8", bits=8, block=None, vectors=Vectors(dim=8, stages=2))
AQ_3X8 = Format("aq_3x8", bits=8, block=None, vectors=Vectors(dim=8, stages=3))

# Moments of optimisers: blocks run over the flattened array, and second moments have no sign.
MOMENT8 = Format("moment8", bits=8, block=256, table=dynamic_map(), flat=True)
MOMENT8_UNSIGNED = Format("moment8_unsigned", bits=8, block=256, table=dynamic_map(signed=False), flat=True)
MOMENT4 = Format("moment4", bits=4, block=128, table=dynamic_map(decades=3), flat=True)
MOMENT4_UNSIGNED = Format("moment4_unsigned", bits=4, block=128, table=SIXTEENTHS, flat=True)
MOMENT_FP8 = Format("moment_fp8", bits=8, block=256, table=E4M3, flat=True)

FORMATS = named(
    NF4, NF4_DQ, FP4, AF4, INT8, INT8_ROW, INT8_GROUP, INT8_TENSOR, INT4, INT4_ZERO, INT3, INT3_ZERO, INT2, INT2_ZERO,
    TERNARY, FP8, FP8_E4M3, FP8_E5M2, FP8_TENSOR, MXFP8, MXFP4, NVFP4, AQ_2X8, AQ_3X8,
)  # fmt: skip
named(DYNAMIC8, SCALE_E4M3, SCALE_E8M0, INT8_ROW_ZERO, NF4_INT8)
named(MOMENT8, MOMENT8_UNSIGNED, MOMENT4, MOMENT4_UNSIGNED, MOMENT_FP8)
