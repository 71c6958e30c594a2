"""Merge-aware training on a mesh, in whole models, and through the files of ``examples.merge``."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.func import grad_and_value

import shard
from examples import merge as program
from fquant import INT8, LOCAL, NF4, NF4_DQ, jit, lora, quantize, random, tree
from fquant.communication import Comm
from fquant.io import peft
from fquant.packed import Packed
from models import decoder, hf
from shard import Rules
from tests.helpers import ranks
from tests.helpers.arrays import assert_equal
from tests.helpers.cases import slow_after
from tests.helpers.hf_models import CONFIGS, GQA, random_params
from tests.helpers.sharding.meshes import batch, config

pytestmark = pytest.mark.xdist_group("ranks")
MATRICES = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
EXPERTS = CONFIGS["qwen3_moe, dense layers, windows"]


def model(cfg, format, tables=False):
    """Return a base with packed matrices, tables too if asked for, and adapters of all of them in float64."""
    pack = lambda w: quantize(w, format) if w.ndim == 2 else stacked([quantize(m, format) for m in w])
    which = rf"embed|final\.head|{MATRICES}|layers\.\d+\.gate_up" if tables else rf"{MATRICES}|layers\.\d+\.gate_up"
    base = tree.map_at(which, pack, random_params(cfg, torch.float32))
    is_packed = lambda x: isinstance(x, Packed)
    base = tree.map(lambda x: x if is_packed(x) else x.double(), base, is_leaf=is_packed)
    adapters = lora.init(base, which, rank=3, key=1)
    wide = lambda path, t: t.double() + 0.05 * random.normal(random.fold(random.key(3), path), tuple(t.shape))
    return base, tree.map_with_path(wide, adapters)


def stacked(many):
    return tree.map(lambda *t: torch.stack(t), *many)


def loss(adapters, base, x, y, count, cfg, comm: Comm = LOCAL):
    params = lora.attach(base, adapters, merge_aware=True)
    return decoder.loss(params, x, y, cfg, comm, dtype=torch.float64, count=count)


FEW = [("tied", NF4_DQ, True), ("experts", NF4_DQ, False), ("untied", INT8, False)]
MANY = [row for row in product(("untied", "tied", "experts"), (NF4_DQ, INT8), (False, True)) if row not in FEW]


@pytest.fixture
def closed():
    """Leave no process group to the tests that follow."""
    yield
    shard.close()


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("name, format, checkpoint", slow_after(3, FEW + MANY))
def test_a_whole_model_is_the_merged_model(name, format, checkpoint):
    """The loss is that of the merged tree to the bit, captured too, with tables and experts; every adapter learns."""
    cfg = EXPERTS if name == "experts" else config(name == "tied")
    base, adapters = model(cfg, format, tables=True)
    x, y = batch(3)
    comm = shard.comm(shard.mesh(), Rules(), recompute=True) if checkpoint else LOCAL
    merged, _ = lora.merge_packed(base, adapters)
    step = lambda *args: grad_and_value(loss)(*args, 7.0, cfg, comm)
    found, value = step(adapters, base, x, y)
    assert torch.equal(value, loss({}, merged, x, y, 7.0, cfg))
    assert all(g.abs().max() > 0 for g in tree.leaves(found))
    if name != "experts":  # a captured mixture sums its rows in another order
        captured, again = jit(step)(adapters, base, x, y)
        assert torch.equal(again, value)
        torch.testing.assert_close(tree.leaves(captured), tree.leaves(found), rtol=1e-9, atol=1e-12)


def on_a_mesh(axes, format, tables):
    cfg = config(False)
    base, adapters = model(cfg, format, tables)
    mesh, rules = shard.mesh(**axes), Rules()
    placed, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
    x, y = shard.share(batch(6), mesh, rules)
    comm, count = shard.comm(mesh, rules), float((batch(6)[1] >= 0).sum())
    step = lambda *args: grad_and_value(loss)(*args, count, cfg, comm)
    args = adapters, shard.local(placed), x, y
    plain, captured = step(*args), jit(step)(*args)
    torch.testing.assert_close(tree.leaves(captured), tree.leaves(plain), rtol=1e-9, atol=1e-12)
    grads, value = shard.reduce(plain, mesh, rules)
    return grads, value


MESHES = [({"fsdp": 2}, NF4, True), ({"fsdp": 2}, NF4_DQ, False), ({"dp": 2}, INT8, True)]


@pytest.mark.parametrize("axes, format, tables", slow_after(1, MESHES))
def test_steps_equal_those_of_one_process(axes, format, tables):
    cfg = config(False)
    base, adapters = model(cfg, format, tables)
    x, y = batch(6)
    wanted = grad_and_value(loss)(adapters, base, x, y, float((y >= 0).sum()), cfg)
    for found in ranks.run(2, on_a_mesh, axes, format, tables):
        for (path, a), b in zip(tree.items(found), tree.leaves(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", slow_after(1, [NF4_DQ, NF4, INT8]), ids=lambda f: f.name)
def test_the_files_of_examples_merge(format, tmp_path):
    """The packed file has the bytes of the forward; its base is a packed folder, the adapter is PEFT's."""
    cfg = GQA
    base = tree.map_at(MATRICES, partial(quantize, format=format), random_params(cfg, torch.bfloat16))
    hf.save_packed(tmp_path / "base", cfg, base, {})
    adapters = lora.dither(base, lora.init(base, MATRICES, rank=3, key=1), 2)
    peft.save(tmp_path / "adapter", adapters, partial(hf.module_name, cfg=cfg))
    args = [tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "--format", format.name]
    assert program.main([str(arg) for arg in args]) == 0
    _, written = hf.load(tmp_path / "out")
    assert_equal(written, lora.merge_packed(base, adapters)[0])
    tokens = torch.arange(10)[None]
    aware = decoder.forward(lora.attach(base, adapters, merge_aware=True), tokens, cfg)
    assert torch.equal(aware, decoder.forward(written, tokens, cfg))
