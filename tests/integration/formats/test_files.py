"""Files of every known format: what is read is equal in every bit, and so are the format, the shape and the dtype."""

import pytest
import torch

from fquant import dequantize, lazy, quantize, tree
from fquant.format import read
from fquant.io import lazy_tree, safetensors
from fquant.lazy import Lazy
from fquant.packed import Packed
from tests.helpers.arrays import randn, same_bits
from tests.helpers.cases import slow_after
from tests.helpers.formats import BLOCKS, KINDS, KNOWN
from tests.helpers.kernels.block_loop import fitting

ALL = {format.name: format for format in KINDS} | KNOWN | BLOCKS


def packed_tree(dtype, map=lambda x: x):
    """Return an array of each format, of an odd width, and stacks of some of them."""
    w = lambda format, *shape: map(fitting(randn(*shape), format).to(dtype))
    stacks = {f"stack of {name}": quantize(w(format, 2, 3, 40), format) for name, format in KNOWN.items()}
    return stacks | {name: quantize(w(format, 5, 67), format) for name, format in ALL.items()}


def assert_equal_packed(got, wanted):
    assert got.keys() == wanted.keys()
    for name, right in wanted.items():
        assert isinstance(got[name], Packed)
        assert (got[name].format, got[name].shape, got[name].dtype) == (right.format, right.shape, right.dtype), name
        assert tree.structure(got[name]) == tree.structure(right), name
        assert all(map(same_bits, tree.leaves(got[name]), tree.leaves(right))), name


@pytest.mark.parametrize("dtype", slow_after(1, [torch.bfloat16, torch.float32, torch.float16]), ids=str)
def test_files_hold_every_format(tmp_path, dtype):
    """Written at once and weight by weight, read at once and lazily; each file is that of the other."""
    wanted = packed_tree(dtype)
    safetensors.save(tmp_path / "whole", wanted)
    lazy_tree.save(tmp_path / "lazy", packed_tree(dtype, lambda w: Lazy(lambda: w, w.to("meta"), lambda: "stamp")))
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "lazy").read_bytes()
    assert_equal_packed(safetensors.load(tmp_path / "whole"), wanted)
    opened = lazy_tree.lazy(tmp_path / "lazy")
    assert_equal_packed(lazy.read(opened), wanted)
    for name, x in opened.items():
        assert tree.structure(x.like) == tree.structure(wanted[name]), name
        assert same_bits(dequantize(x).read(), dequantize(wanted[name])), name


def test_texts_hold_every_format():
    for name, format in ALL.items():
        assert read(format.text) == format, name
        assert name not in KNOWN or format.text == name, name
