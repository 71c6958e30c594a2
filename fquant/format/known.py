"""The formats that have names."""

from dataclasses import replace

from .definition import Format, Vectors, named
from .tables import E2M1, E4M3, FP4_VALUES, NORMAL4, SIXTEENTHS, dynamic_map

DYNAMIC8 = Format("dynamic8", bits=8, block=256, table=dynamic_map(), flat=True, center=True)
NF4 = Format("nf4", bits=4, block=64, table=NORMAL4)
NF4_DQ = replace(NF4, name="nf4_dq", scale=DYNAMIC8)
FP4 = Format("fp4", bits=4, block=64, table=FP4_VALUES)
INT8 = Format("int8", bits=8, block=None)
AQ_2X8 = Format("aq_2x8", bits=8, block=None, vectors=Vectors(dim=8, stages=2))
AQ_3X8 = Format("aq_3x8", bits=8, block=None, vectors=Vectors(dim=8, stages=3))
INT4 = Format("int4", bits=4, block=128, table=tuple(map(float, range(-8, 8))))
INT4_ZERO = Format("int4_zero", bits=4, block=128, table=tuple(map(float, range(16))), zero=True)
MXFP4 = Format("mxfp4", bits=4, block=32, table=E2M1)
FP8 = Format("fp8", bits=8, block=128, table=E4M3)

# Moments of optimisers: blocks run over the flattened array, and second moments have no sign.
MOMENT8 = Format("moment8", bits=8, block=256, table=dynamic_map(), flat=True)
MOMENT8_UNSIGNED = Format("moment8_unsigned", bits=8, block=256, table=dynamic_map(signed=False), flat=True)
MOMENT4 = Format("moment4", bits=4, block=128, table=dynamic_map(decades=3), flat=True)
MOMENT4_UNSIGNED = Format("moment4_unsigned", bits=4, block=128, table=SIXTEENTHS, flat=True)
MOMENT_FP8 = Format("moment_fp8", bits=8, block=256, table=E4M3, flat=True)

FORMATS = named(NF4, NF4_DQ, FP4, INT8, AQ_2X8, AQ_3X8, INT4, INT4_ZERO, MXFP4, FP8)
named(DYNAMIC8, MOMENT8, MOMENT8_UNSIGNED, MOMENT4, MOMENT4_UNSIGNED, MOMENT_FP8)
