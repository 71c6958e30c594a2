"""Test data of packed arrays: formats of every kind, arrays of arbitrary bits, and each instruction set in turn.

A packed array is drawn from its layout, not quantised. So every code occurs with every scale, and tests of decoding do
not depend on encoding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from fquant import format
from fquant.format import DYNAMIC8, FP4, FP8, INT2_ZERO, INT3, INT3_ZERO, INT4, INT4_ZERO, INT8, MXFP4, NF4, NF4_DQ
from fquant.kernels import cpu
from fquant.kernels.dispatch import BY_DEVICE, VARIABLE
from fquant.kernels.spec import layout

# Every format that the package names, and each with other blocks. Tests over these hold a new format, too.
KNOWN = {f.name: f for f in vars(format).values() if isinstance(f, format.Format)}
BLOCKS = {f"{f.name}:{n or 'row'}": replace(f, block=n) for f in KNOWN.values() for n in (16, None) if n != f.block}

BY_ROWS8 = replace(DYNAMIC8, name="dynamic8_rows", flat=False, center=False)
_nf4, _dynamic8 = NF4.table or (), DYNAMIC8.table or ()
_shuffled = torch.randperm(256, generator=torch.Generator().manual_seed(0), device="cpu").tolist()
UNSORTED = replace(NF4, name="unsorted", table=tuple(_nf4[i * 7 % 16] for i in range(16)))
CODECS = (  # every kind of codes
    NF4,
    FP4,
    INT8,
    BY_ROWS8,
    replace(INT8, name="int8_64", block=64),
    replace(BY_ROWS8, name="dynamic8_row", block=None),
    replace(BY_ROWS8, name="dynamic8_32", block=32),
    UNSORTED,
    replace(NF4, name="coarse", block=128, table=(-1.0,) * 5 + (0.0, 0.5) + (0.25,) * 9),
    replace(BY_ROWS8, name="unsorted8", table=tuple(_dynamic8[i] for i in _shuffled)),
)
KINDS = (  # and every kind of scales and of block layouts
    *CODECS,
    NF4_DQ,
    DYNAMIC8,
    replace(FP4, name="fp4_dq", scale=DYNAMIC8),
    replace(NF4, name="centred", center=True),
    replace(INT8, name="int8_centred", center=True),
    replace(NF4, name="flat", flat=True),
    replace(NF4_DQ, name="flat_dq", flat=True),
    replace(NF4_DQ, name="flat_centred", flat=True, center=True),
    replace(INT8, name="int8_flat", flat=True),
    replace(INT8, name="int8_64_flat", flat=True, block=64),
    replace(BY_ROWS8, name="dynamic8_dq", block=32, scale=DYNAMIC8),
    replace(NF4, name="scale_int8", scale=INT8),
    replace(NF4, name="scale_nf4", scale=NF4),
    replace(NF4, name="scale_uncentred", block=32, scale=replace(DYNAMIC8, name="uncentred", center=False, block=32)),
    replace(NF4, name="scale_by_rows", block=32, scale=replace(BY_ROWS8, block=32)),
    replace(NF4, name="scale_twice", scale=replace(DYNAMIC8, name="dynamic8_dq", scale=DYNAMIC8)),
    INT4_ZERO,
    replace(INT4_ZERO, name="zero_dq", block=64, scale=DYNAMIC8),
    replace(INT4, name="int4_row", block=None),
    replace(MXFP4.plain, name="e2m1_16", block=16),
    replace(INT2_ZERO, name="int2_16", block=16),
    replace(INT3, name="int3_row", block=None),
    INT3_ZERO,
    replace(FP8, name="int8_zero", block=None, table=tuple(map(float, range(256))), zero=True),
    FP8,
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL = torch.tensor([0.0, -0.0, 1.0, 1e-38, 1.2e-38, 1e-45, 5e-40, 6e-8, 3e-5, 7e4, 1e38, 0.1])

try:
    ISAS, NOT_BUILT = tuple(f"cpu:{name}" for name in cpu.isas()), ""
except ImportError as error:
    ISAS, NOT_BUILT = (), str(error)
built = pytest.mark.skipif(not ISAS, reason=NOT_BUILT)
CARD = pytest.param("triton", marks=pytest.mark.cuda)  # a backend beside those of the host


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Set FQUANT_KERNELS to ``backend`` inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, backend)
        yield


def own(device: torch.device) -> tuple[str, ...]:
    """Return the backends with kernels for tensors on ``device``, one for each instruction set of the host."""
    return ISAS if device.type == "cpu" else (BY_DEVICE[device.type],)


def draw(spec, stack=(), seed=0, special=False):
    """Draw buffers of ``spec`` with stack dims ``stack``: all codes, scales of all sizes, or SPECIAL ones too."""
    g, table = torch.Generator().manual_seed(seed), spec.format.table or (1.0,)
    top = max(abs(v) for v in table if v == v)

    def leaf(name, shape, dtype):
        if dtype != torch.float32:
            t = torch.randint(*((-128, 128) if dtype == torch.int8 else (0, 256)), shape, generator=g, dtype=dtype)
            return t if special or table[-1] == table[-1] else t.where((t & 127) != 127, 0)  # NaN of FP8
        t = torch.randn(shape, generator=g) * torch.randn(shape, generator=g).exp() / top
        if special:
            pick = torch.randint(3 * len(SPECIAL), shape, generator=g)
            t = torch.where(pick < len(SPECIAL), SPECIAL[pick % len(SPECIAL)], t)
        if name.endswith("zero"):  # most are integers, as those of GPTQ, and some not, as those of HQQ
            t = torch.where(torch.rand(shape, generator=g) < 0.7, torch.randint(17, shape, generator=g), t * top)
        return t.abs() if name.endswith("scale") else t

    return [leaf(name, (*stack, *shape), dtype) for name, shape, dtype in layout(spec)]


def shifted(t):
    """Return a copy that is aligned only to its dtype."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    room[1:] = t.reshape(-1)
    return room[1:].view(t.shape)


def strided(t):
    """Return a copy with gaps between its elements."""
    return torch.stack([t, t], -1)[..., 1]


def alike(a, b):
    """Return True if all bits are equal, except the payload of NaN."""
    if a.dtype != b.dtype or a.shape != b.shape or not a.is_floating_point():
        return a.dtype == b.dtype and torch.equal(a, b)
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return bool(((a.view(as_int) == b.view(as_int)) | (a.isnan() & b.isnan())).all())
