"""Slots of arguments and tensors in the memory of others have the alignment and layout of the originals."""

import pytest
import torch

from fquant.compile.cuda_graph.addresses import copy, slot, usual


def test_a_slot_is_aligned_as_its_argument():
    x = torch.zeros(20)[1:]
    assert slot(x).data_ptr() % 16 == x.data_ptr() % 16 != 0


@pytest.mark.parametrize("stride", [(4, 1), (1, 3), (0, 1), (8, 2)])
def test_a_copy_has_every_element(stride):
    x = torch.arange(64.0).as_strided((3, 4), stride, 5)
    to = slot(x)
    copy([(to, x)])
    assert torch.equal(to, x) and to.stride() == x.stride()


def test_a_tensor_of_inference_mode_is_written_where_it_is():
    with torch.inference_mode():
        x = torch.zeros(2, 3).t()
    y = usual(x)
    assert not y.is_inference() and y.stride() == x.stride() and usual(y) is y
    y += 1
    assert x.tolist() == [[1.0] * 2] * 3
