"""A folder that not all ranks see, as the disks of two hosts: an error on every rank, and soon."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shard
from shard import agree, checkpoint
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")


def elsewhere(roots, f):
    """Call ``f`` on a mesh, with relative paths in the folder of this rank."""
    mesh, before = shard.mesh(fsdp=dist.get_world_size()), os.getcwd()
    os.chdir(roots[dist.get_rank()])
    try:
        with mock.patch.object(agree, "SEEN_WITHIN", 0.5):
            return f(mesh)
    finally:
        os.chdir(before)


def saved(mesh):
    checkpoint.save("run/step-1", {"a": torch.ones(3)}, mesh, shard.Rules())


def saved_elsewhere_later(mesh):
    """Write two checkpoints in a folder that both ranks see, and a third in one that they do not."""
    shared, rules, state = Path(os.getcwd()).parent / "shared", shard.Rules(), {"a": torch.ones(3)}
    writing = checkpoint.begin(shared / "step-1", state, mesh, rules)
    writing = checkpoint.begin(shared / "step-2", state, mesh, rules, after=writing)
    checkpoint.begin("run/step-3", state, mesh, rules, after=writing)


@pytest.mark.parametrize("f", [saved, saved_elsewhere_later])
def test_a_folder_that_a_rank_does_not_see_is_named_on_every_rank(f, tmp_path):
    roots = [tmp_path / "host-0", tmp_path / "host-1"]
    for root in roots:
        root.mkdir()
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, elsewhere, roots, f, timeout=20)
    errors = caught.value.failures
    assert sorted(errors) == [0, 1] and {error.type for error in errors.values()} == {"ValueError"}
    fault = "tmp: is not there, and another rank made it; use a folder that all ranks see"
    assert errors[0].message.startswith("checkpoint failed on rank 1: ValueError: run/.step-")
    assert all(fault in error.message for error in errors.values())
    assert not list((roots[0] / "run").iterdir()) and not list(roots[1].iterdir())  # what was made is removed


def waited(path):
    """Wait for a folder that rank 0 makes, maybe after rank 1 has looked."""
    if dist.get_rank() == 0:
        path.mkdir()
    agree.await_path("test", path)
    return path.exists()


def test_a_path_that_is_there_is_waited_for(tmp_path):
    assert ranks.run(2, waited, tmp_path / "a", timeout=10) == [True, True]
