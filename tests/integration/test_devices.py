"""Every public verb computes on the device of its arguments, whether that device is there or not.

Arguments are fake tensors of the device meta, which raise where they meet a tensor of the host. So the first test shows
what a GPU would: a factory without its device, or a table or a key that stayed behind. The second runs on a GPU alone.
"""

import pytest
import torch

from fquant import tree
from tests.helpers.devices.placing import META, astray, elsewhere, on
from tests.helpers.devices.verbs import VERBS

OUTLINED = ("quantize ", "loftq")  # which read values but those of meta tensors
VALUES = ("dither", "eva", "lora.init dora")  # which need the values of their arguments
AMBIGUOUS = (  # signs of singular vectors, and codes that follow from sums in another order or from rounded draws
    "quantize aq", "quantize bf16 aq", "pissa", "olora", "loftq", "eva", "dither",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in VERBS if name not in VALUES])
def test_nothing_is_made_elsewhere(name):
    f, args = VERBS[name]
    with astray(fake=not name.startswith(OUTLINED)) as found:
        given = on(META, args)
        found.clear()
        assert elsewhere(f(*given), META) == []
    assert found == []


@pytest.mark.cuda
@pytest.mark.parametrize("name", VERBS)
def test_a_device_gives_what_the_host_gives(name, device):
    """Rounding differs: products may be rounded to bfloat16 where inputs are, and float32 sums have another order."""
    f, args = VERBS[name]
    wanted, given = f(*args), on(device, args)
    got = f(*given)
    assert elsewhere(got, device) == []
    as_tree = lambda x: {"": x} if isinstance(x, torch.Tensor) else x
    assert tree.structure(as_tree(got)) == tree.structure(as_tree(wanted))
    for (path, a), b in zip(tree.items(as_tree(got)), tree.leaves(as_tree(wanted)), strict=True):
        if name.startswith(AMBIGUOUS) or not isinstance(b, torch.Tensor):
            continue
        if not b.is_floating_point():
            assert torch.equal(a.cpu(), b), path
            continue
        bound = (2e-2 if b.dtype == torch.bfloat16 else 1e-4) * max(1.0, b.double().abs().nan_to_num().max().item())
        torch.testing.assert_close(a.cpu().double(), b.double(), rtol=0, atol=bound, equal_nan=True, msg=path or None)
