"""Checkpoints: written on one mesh and read on another in every bit, read by torch, whole or not there."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

import shard
from fquant import INT8_ROW, NF4_DQ, lora, optim, quantize, tree
from fquant.io import safetensors
from models import decoder
from shard import Precision, checkpoint
from shard.checkpoint import writing
from shard.checkpoint.local_ranges import local_ranges
from tests.helpers import ranks
from tests.helpers.sharding import training
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import config

pytestmark = pytest.mark.xdist_group("ranks")
CFG = config(False)
PROJECTIONS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
MESHES = [{"fsdp": 1}, {"fsdp": 2}, {"fsdp": 3}, {"dp": 2, "fsdp": 2}, {"dp": 3}]


def stepped(opt, params):
    """Return moments after a step with the parameters as gradients."""
    return opt.update(params, opt.init(params), params)[1]


def states(axes):
    """Return the mesh, its rules, and trees: adapters, trained floats and codes, a packed base at rest."""
    mesh, rules = shard.mesh(**axes), shard.Rules()
    dims, params = decoder.dims(CFG), training.params(CFG, torch.float32)
    packed = tree.map_at(PROJECTIONS, lambda w: quantize(w, INT8_ROW), params)
    floats = shard.local(shard.place(params, dims, rules, mesh, CFG, Precision()))
    codes = shard.local(shard.place(packed, dims, rules, mesh, CFG, Precision()))
    base = tree.map_at(PROJECTIONS, lambda w: quantize(w, NF4_DQ), params)
    dense = shard.weights.dense(codes)
    adapters = lora.init(params, r"layers\.0\.(q|v)", rank=4, key=1)
    found = {
        "adapters": (adapters, stepped(optim.adamw(1e-3), adapters), torch.tensor(7)),
        "floats": (floats, stepped(optim.adamw(1e-3, moments=optim.DYNAMIC8), floats)),
        "plain": stepped(optim.lion(1e-3), floats),
        "codes": (codes, optim.adamw(1e-3, moments=optim.DYNAMIC8).init(dense)),
        "base": shard.place(base, dims, rules, mesh, CFG),
    }
    return mesh, rules, found


@pytest.fixture
def alone():
    """A mesh of this process, which has no group afterwards."""
    yield shard.mesh(fsdp=1), shard.Rules()
    shard.close()


def put(axes, folder):
    mesh, rules, x = states(axes)
    checkpoint.save(folder, x, mesh, rules)


def get(axes, folder):
    """Return True if what is read is what this mesh would have written."""
    mesh, rules, x = states(axes)
    empty = tree.map(lambda t: torch.zeros_like(t) - 1 if t.dtype.is_floating_point else torch.zeros_like(t), x)
    found = checkpoint.load(folder, empty, mesh, rules)
    known = json.loads((Path(folder) / checkpoint.MANIFEST).read_text())["tensors"]

    def same(a, b):
        there = max(0, torch.Size(known[a.name]["shape"]).numel() - a.start)  # behind it is padding
        return a.name == b.name and same_bits(a.values[:there], b.values[:there]) and not b.values[there:].any()

    return all(map(same, local_ranges(x, mesh, rules), local_ranges(found, mesh, rules)))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of each mesh."""
    root = tmp_path_factory.mktemp("checkpoints")
    for i, axes in enumerate(MESHES):
        ranks.run(size(axes), put, axes, str(root / f"step-{i}"))
    return root


def size(axes):
    return torch.Size(axes.values()).numel()


@pytest.mark.parametrize("to", MESHES, ids=str)
def test_any_mesh_reads_what_any_other_wrote(to, written):
    for i in range(len(MESHES)):
        assert all(ranks.run(size(to), get, to, str(written / f"step-{i}"))), MESHES[i]


def test_tensors_are_the_same_on_every_mesh_and_written_once(written):
    tables = [
        json.loads((written / f"step-{i}" / checkpoint.MANIFEST).read_text())["tensors"] for i in range(len(MESHES))
    ]
    padded = re.compile(r".*\.1\.(mean|square)\..*\.\d+$")  # codes of moments, whose padding depends on the mesh
    same = [{name: it for name, it in table.items() if not padded.match(name)} for table in tables]
    for table in same:
        assert table.items() == same[0].items(), set(map(str, table.items())) ^ set(map(str, same[0].items()))
    assert len(same[0]) > 100
    for i, axes in enumerate(MESHES):
        files = list((written / f"step-{i}").glob("*.safetensors"))
        assert len(files) == size(axes)
        counts = [sum(e.stop - e.start for e in safetensors.header(f).tensors.values()) for f in files]
        wanted = sum(
            torch.Size(it["shape"]).numel() * safetensors.DTYPES[it["dtype"]].itemsize for it in tables[i].values()
        )
        assert sum(counts) == wanted


@pytest.mark.usefixtures("alone")
def test_torch_reads_the_files(written):
    folder = written / "step-2"  # of three ranks
    tensors = json.loads((folder / checkpoint.MANIFEST).read_text())["tensors"]
    make = lambda it: torch.zeros(torch.Size(it["shape"]).numel(), dtype=safetensors.DTYPES[it["dtype"]])
    found = {name: make(it) for name, it in tensors.items() if 0 not in it["shape"]}
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    mesh, rules, x = states({"fsdp": 1})
    for it in local_ranges(x, mesh, rules):
        if not it.is_padded and len(it.values):
            assert same_bits(found[it.name], it.values), it.name


def overwrite(folder):
    """Begin to write a tree, and change it before it is written."""
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    x = {"a": torch.arange(300_000.0), "b": [torch.ones(3)]}
    writing = checkpoint.begin(folder, x, mesh, rules)
    tree.map(lambda t: t.zero_(), x)
    checkpoint.finish(writing)
    found = checkpoint.load(folder, tree.map(lambda t: t.to("meta"), x), mesh, rules)
    return torch.equal(found["a"], torch.arange(300_000.0)) and bool(found["b"][0].all())


def test_a_tree_may_change_while_it_is_written(tmp_path):
    assert all(ranks.run(2, overwrite, str(tmp_path / "step-1")))
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def several(root):
    """Write a checkpoint a step, each after the one before; return the states that are read."""
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    x = {"a": torch.arange(300_000.0), "b": [torch.ones(3)], "c": torch.ones(2, 3)}
    written, former = [], None
    for step in range(4):
        x = tree.map(lambda t: t + 1, x) if step < 2 else {**x, "c": torch.full((step,), 7.0)}  # another shape
        former = checkpoint.begin(f"{root}/step-{step}", x, mesh, rules, after=former)
        written.append((former.plan, tree.map(torch.clone, x)))
        tree.map(lambda t: t.zero_(), x) if step == 3 else None
    assert former is not None
    checkpoint.finish(former)
    plans = [plan for plan, _ in written]
    return [plans[0] is plans[1], plans[1] is plans[2], plans[2] is plans[3]], [x for _, x in written]


def test_each_of_several_checkpoints_has_the_values_of_its_step(tmp_path):
    """A plan is used again for the same shapes alone."""
    for same, states in ranks.run(2, several, str(tmp_path)):
        assert same == [True, False, False]
        for step, x in enumerate(states):
            assert same_bits(checkpoint.read(tmp_path / f"step-{step}"), x), step
    assert checkpoint.steps(tmp_path) == [0, 1, 2, 3] and len(list(tmp_path.iterdir())) == 4


def wholes(axes):
    mesh, rules, x = states(axes)
    return [shard.whole(x[name], mesh, rules) for name in ("adapters", "floats", "plain")]


def test_a_checkpoint_is_read_without_a_mesh(written):
    """It is what rank 0 has of the whole tree; codes of moments end with padding, which depends on the mesh."""
    wanted = ranks.run(2, wholes, {"fsdp": 2})[0]
    found = checkpoint.read(written / "step-1")
    for x, name in zip(wanted, ("adapters", "floats", "plain"), strict=True):
        assert same_bits(found[name], x), name
    assert set(found["codes"][0].layers[0].q.codes.shape) == set(training.params(CFG, torch.float32).layers[0].q.shape)


def late(folder):
    """Let rank 1 go on only when the folder has its final name, after its file has got its own."""
    mesh, rules = shard.mesh(fsdp=2), shard.Rules()

    def replace(a, b, replace=os.replace):
        replace(a, b)
        until = time.monotonic() + 20
        while not Path(folder).exists() and time.monotonic() < until:
            time.sleep(0.001)

    with mock.patch.object(os, "replace", replace if dist.get_rank() else os.replace):
        checkpoint.save(folder, {"a": torch.ones(3)}, mesh, rules)
    return Path(folder).is_dir()


def test_a_rank_may_be_slower_than_the_name_of_the_folder(tmp_path):
    assert all(ranks.run(2, late, str(tmp_path / "step-1")))


FORMER = Path(__file__).parent / "step-3"  # written on two ranks by an earlier release


def former_state():
    adapters = {"layers.0.q": lora.Lora(torch.arange(8.0).view(2, 4), torch.arange(6.0).view(3, 2) / 8, alpha=4.0)}
    codes = quantize(torch.arange(512.0).view(4, 128) / 64 - 4, NF4_DQ)
    return [adapters, stepped(optim.adamw(1e-3), adapters), {"codes": codes, "bf16": torch.ones(5).bfloat16()}]


def test_a_checkpoint_of_an_earlier_release_is_read(alone):
    x = former_state()
    assert same_bits(checkpoint.read(FORMER), x)
    assert same_bits(checkpoint.load(FORMER, tree.map(torch.zeros_like, x), *alone), x)


def disk_is_full(path, is_last=True):
    raise OSError("the disk is full")


def faulty(folder, fault):
    mesh, rules, rank = shard.mesh(fsdp=dist.get_world_size()), shard.Rules(), dist.get_rank()
    x = {"a": torch.ones(3), "b": torch.ones(2)}
    if fault == "differ" and rank:
        x = {"a": torch.ones(4), "b": torch.ones(2)}
    if fault == "strided" or (fault == "strided on one" and rank):
        x["b"] = torch.ones(2, 2).mT[:1]
    if fault == "write":
        kept, writing.replacing = writing.replacing, disk_is_full if rank else writing.replacing
        try:
            begun = checkpoint.begin(folder, x, mesh, rules)
            begun.thread.join()
        finally:
            writing.replacing = kept
        checkpoint.begin(f"{folder}-next", x, mesh, rules, after=begun)
    checkpoint.save(folder, x, mesh, rules)
    if fault == "again":
        checkpoint.save(folder, x, mesh, rules)
    if fault == "other":
        checkpoint.load(folder, {"a": x["a"], "c": x["b"]}, mesh, rules)
    if fault == "shape":
        checkpoint.load(folder, {"a": torch.ones(5), "b": x["b"]}, mesh, rules)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("differ", "checkpoint: ranks disagree on tensors: rank 0 has"),
        ("strided", r"b: got a tensor with strides \(1, 2\), wanted a contiguous one"),
        ("write", r"rank 0: ValueError: .*rank-1-of-2.safetensors: OSError: the disk is full"),
        ("strided on one", r"(failed on rank 1: ValueError: )?b: got a tensor with strides"),
        ("again", "step-1: exists, wanted a new folder; a checkpoint is never written over"),
        ("other", r"manifest.json: holds another tree; load it with the release that wrote it"),
        ("shape", r"manifest.json: a: got {'dtype': 'F32', 'shape': \[3\]}, wanted {'dtype': 'F32', 'shape': \[5\]}"),
    ],
)
def test_faults_are_named_on_every_rank(fault, error, tmp_path):
    with pytest.raises(ranks.RankFailure, match=error) as caught:
        ranks.run(2, faulty, str(tmp_path / "step-1"), fault)
    assert len(caught.value.failures) == 2
    left = [p.name for p in tmp_path.iterdir()]
    assert "step-1" not in left or fault in ("again", "other", "shape")


def widowed(folder):
    """Begin a checkpoint of which rank 1 writes nothing, as if it were killed, and let the program of rank 0 end."""
    mesh, rules, over = shard.mesh(fsdp=2), shard.Rules(), threading.Thread(target=int)
    over.start()
    over.join()
    fake = SimpleNamespace(Thread=threading.Thread, main_thread=lambda: over)
    written = writing._write if dist.get_rank() == 0 else lambda *_: None
    with mock.patch.object(writing, "threading", fake), mock.patch.object(writing, "_write", written):
        begun = checkpoint.begin(folder, {"a": torch.ones(3)}, mesh, rules)
        begun.thread.join(30)
    assert not begun.thread.is_alive()
    return [str(error) for error in begun.errors]


def test_a_program_that_ends_does_not_wait_for_a_rank_that_died(tmp_path):
    found = ranks.run(2, widowed, str(tmp_path / "step-1"))
    assert found == [["rank-1-of-2.safetensors: not written in 1 s; is its rank alive?"], []]
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize("damage", ["missing", "shorter", "manifest", "other file", "no manifest"])
def test_a_checkpoint_that_is_not_whole_is_refused(damage, tmp_path, alone):
    folder = tmp_path / "step-1"
    ranks.run(2, overwrite, str(folder))
    file = folder / "rank-0-of-2.safetensors"
    wanted = str(file)
    if damage == "missing":
        file.unlink()
    if damage == "shorter":
        os.truncate(file, file.stat().st_size - 1)
    if damage == "manifest":
        path = folder / checkpoint.MANIFEST
        path.write_text(path.read_text().replace("300000", "300001"))
        wanted = "manifest.json: its content has changed"
    if damage == "other file":
        file.write_bytes((folder / "rank-1-of-2.safetensors").read_bytes())
    if damage == "no manifest":
        (folder / checkpoint.MANIFEST).unlink()
        wanted = "got no manifest.json there"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        checkpoint.load(folder, {"a": torch.ones(300_000), "b": [torch.ones(3)]}, *alone)


@pytest.mark.parametrize("way", ["flip", "cut"])
def test_a_changed_byte_anywhere_is_refused_with_the_name_of_its_file(way, tmp_path, alone):
    draw = random.Random(3)
    x = {"a": torch.randn(300), "b": quantize(torch.randn(4, 128), NF4_DQ), "step": torch.tensor(7)}
    checkpoint.save(tmp_path / "step-1", x, *alone)
    for path in (tmp_path / "step-1").iterdir():
        good = path.read_bytes()
        for _ in range(200):
            at = draw.randrange(len(good))
            damaged = bytearray(good)
            damaged[at] ^= 1 << draw.randrange(8)
            path.write_bytes(bytes(damaged) if way == "flip" else good[:at])
            with pytest.raises(ValueError, match=path.name):
                checkpoint.load(tmp_path / "step-1", x, *alone)
        path.write_bytes(good)
    assert same_bits(checkpoint.load(tmp_path / "step-1", x, *alone), x)


ENDLESS = """
import sys, torch, shard
from shard import checkpoint
mesh, rules = shard.mesh(fsdp=1), shard.Rules()
for step in range(1, 10_000):
    x = {"a": torch.full((1 << 20,), float(step)), "step": torch.tensor(step)}
    checkpoint.save(f"{sys.argv[1]}/step-{step}", x, mesh, rules)
    checkpoint.keep(sys.argv[1], last=2)
"""


def test_a_kill_leaves_whole_checkpoints_and_temporary_folders(tmp_path, alone):
    like = {"a": torch.ones(1 << 20), "step": torch.tensor(0)}
    for attempt in range(2):
        root = tmp_path / str(attempt)
        writer = subprocess.Popen([sys.executable, "-c", ENDLESS, str(root)])
        try:
            while not checkpoint.steps(root):
                assert writer.poll() is None
                time.sleep(0.01)
            time.sleep(0.029 * attempt)
        finally:
            writer.kill()
            writer.wait()
        found = checkpoint.steps(root)
        assert 1 <= len(found) <= 3
        for step in found:
            x = checkpoint.load(root / f"step-{step}", like, *alone)
            assert int(x["step"]) == step and bool((x["a"] == step).all())
        checkpoint.clean(root)
        assert sorted(p.name for p in root.iterdir()) == sorted(f"step-{step}" for step in found)


def kept(root):
    mesh, former, found = shard.mesh(fsdp=2), None, list[list[int]]()

    def first():
        found.append(checkpoint.steps(root))
        checkpoint.keep(root, last=1)
        if len(found) == 4:
            raise OSError("not permitted")

    for i in range(4):
        former = checkpoint.begin(f"{root}/step-{i}", {"a": torch.ones(3)}, mesh, shard.Rules(), former, first=first)
    with pytest.raises(ValueError, match=r"step-3: not permitted"):
        checkpoint.finish(former)  # type: ignore[arg-type]
    return found, checkpoint.steps(root)


def test_old_checkpoints_are_removed_before_a_new_one_is_written(tmp_path):
    assert ranks.run(2, kept, str(tmp_path)) == [([[], [0], [0, 1], [1, 2]], [2]), ([], [2])]


def test_the_last_and_the_best_are_kept(tmp_path, alone):
    for step in range(5):
        checkpoint.save(tmp_path / f"step-{step}", {"a": torch.ones(1)}, *alone)
    (tmp_path / "step-7").mkdir()  # without a manifest
    checkpoint.keep(tmp_path, last=2, others=(1,))
    assert checkpoint.steps(tmp_path) == [1, 3, 4]
    with pytest.raises(ValueError, match="keep: got last 0, wanted at least 1"):
        checkpoint.keep(tmp_path, last=0)
