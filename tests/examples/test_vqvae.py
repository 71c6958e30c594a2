"""examples.vqvae: patches of photographs, and small complete runs on one process and on two."""

import contextlib
import dataclasses
import io
import json
import math
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

from examples.common.command_line import axes_in
from examples.vqvae import cli, photographs, quantisers, train
from examples.vqvae.options import Options
from examples.vqvae.train import Training
from fquant import random, vq
from tests.helpers import ranks
from tests.helpers.sharding.checkpoints import last_bytes, last_state
from tests.helpers.vq.peers import assert_close

pytestmark = pytest.mark.xdist_group("ranks")

ROOT = Path(__file__).parents[2]
# With seven patches two ranks have unequal shares.
TINY = "--codes 8 --dim 4 --hidden 8 --patch 8 --steps 3 --batch 7".split()
TRACED = 300.0  # seconds: ranks trace a step, several on one core
FILES = {"codebook.png", "metrics.jsonl", "reconstruction.png", "result.json", "run.json"}


@pytest.fixture(scope="module")
def pictures():
    return photographs.load()


def read(folder):
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in step.items() if name != "images_per_second"} for step in steps]


# --- photographs


def test_photographs_are_those_of_the_wheel(pictures):
    shapes = {name: tuple(pixels.shape) for name, pixels in pictures.items()}
    assert shapes == {
        "astronaut": (3, 512, 512), "chelsea": (3, 300, 451), "coffee": (3, 400, 600), "rocket": (3, 427, 640),
        "motorcycle": (3, 500, 741),
    }  # fmt: skip
    assert all(pixels.dtype == torch.uint8 and pixels.float().std() > 30 for pixels in pictures.values())


def test_without_scikit_image(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "skimage", None)
    refused(capsys, "pip install 'fquant[images]'", *TINY, "--out", tmp_path / "run")


def marked(width=50, height=20):
    """Return a photograph whose pixels are their own coordinates."""
    at = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    return torch.cat([at, torch.zeros(1, height, width)]).to(torch.uint8)


def test_patches_keep_out_of_what_is_held_out():
    photograph = marked()
    parts = photographs.parts([photograph], 8)
    assert [part.shape for part in parts] == [(3, 20, 20)] * 2
    found = (photographs.patches(parts, random.fold(random.key(0), torch.arange(4000)), 8) * 255).round()
    rows, columns = found[:, 0].unique().tolist(), found[:, 1].unique().tolist()
    assert rows == list(range(20)) and columns == [*range(20), *range(30, 50)]
    assert photographs.held(photograph)[1].unique().tolist() == list(range(20, 30))
    mirrored = found[:, 1, 0, 0] > found[:, 1, 0, -1]
    assert 1800 < mirrored.sum() < 2200
    straight = torch.where(mirrored[:, None, None, None], found.flip(-1), found)
    for step, channel, dim in ((1, 0, 1), (1, 1, 2)):  # a patch is of neighbours
        assert (straight[:, channel].diff(dim=dim) == step).all()
    corners = straight[:, :2, 0, 0]
    assert len(corners.unique(dim=0)) == 2 * 13 * 13  # all places occur


def test_a_patch_is_of_its_key(pictures):
    parts = photographs.parts(list(pictures.values()), 16)
    keys = random.fold(random.key(1), torch.arange(9))
    together = photographs.patches(parts, keys, 16)
    apart = torch.cat([photographs.patches(parts, keys[i : i + 3], 16) for i in (0, 3, 6)])
    assert torch.equal(together, apart) and len(together.flatten(1).unique(dim=0)) == 9
    assert together.min() >= 0 and together.max() <= 1


def test_tiles_are_the_held_out_part():
    photograph = marked()
    found = (photographs.tiles([photograph], 4) * 255).round()
    assert found.shape == (5 * 2, 3, 4, 4)
    assert torch.equal(found[0, :2], photographs.held(photograph)[:2, :4, :4].float())
    assert torch.equal(found[3, :2], photographs.held(photograph)[:2, 4:8, 4:8].float())
    assert photographs.portrait(photograph, 4).shape == (3, 16, 8)


def test_variance(pictures):
    parts = photographs.parts(list(pictures.values())[:2], 8)
    values = torch.cat([part.flatten() for part in parts]).numpy() / 255
    assert photographs.variance(parts) == pytest.approx(values.var(), rel=1e-5)


# --- quantisers


@pytest.mark.parametrize("num_codes, levels", [(8, (8,)), (512, (8, 8, 8)), (1000, (8, 5, 5, 5)), (1024, (8, 8, 4, 4))])
def test_levels(num_codes, levels):
    found = quantisers.levels(num_codes)
    assert torch.tensor(found).prod() == num_codes and (len(found), max(found)) == (len(levels), max(levels))


def test_usage_and_perplexity():
    two = quantisers.make("fsq", 8, 2, 4, random.key(0))
    codes = torch.tensor([[[0, 7], [0, 6]], [[3, -1], [0, 5]]])
    counts = quantisers.usage(codes, two)
    assert counts.tolist() == [[3, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]
    entropy = -(0.75 * torch.tensor(0.75).log() + 0.25 * torch.tensor(0.25).log())
    assert_close(vq.perplexity(counts), torch.stack([entropy.exp(), torch.tensor(3.0)]))
    assert quantisers.share_used(counts) == [0.25, 0.375]


def test_blocks_and_back():
    images = random.uniform(random.key(2), (2, 3, 8, 12))
    rows = quantisers.blocks(images, 4)
    assert rows.shape == (2, 2, 3, 48) and torch.equal(rows[1, 0, 2].reshape(3, 4, 4), images[1, :, :4, 8:])
    book = vq.init(0, 12, 48)
    exact = vq.kmeans(book, rows, random.key(0))  # a code for each row
    assert_close(quantisers.from_pixels([exact], images, 4), images)


# --- runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a small run in this process."""
    folder, printed = tmp_path_factory.mktemp("vqvae") / "run", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main([*TINY, "--out", str(folder)]) == 0
    (folder.parent / "printed").write_text(printed.getvalue())
    return folder


def test_a_run_writes_everything(run):
    assert {p.name for p in run.iterdir()} == FILES | {"checkpoints"}
    printed = (run.parent / "printed").read_text()
    assert all(text in printed for text in ("VQ-VAE", "k-means of pixels", "codes used"))
    assert [s["step"] for s in read(run)] == [0, 1, 2]
    for name in ("codebook.png", "reconstruction.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")
    state = last_state(run)
    assert isinstance(state, Training) and isinstance(state.quantiser, vq.Book) and int(state.done) == 3
    result = json.loads((run / "result.json").read_text())
    assert result["bits_per_pixel"] == 3 / 16
    assert all(8 < result[name] < 30 for name in ("psnr", "psnr_kmeans", "psnr_mean"))
    assert 1 < result["perplexity"][0] <= 8 and 0 < result["used"][0] <= 1


@pytest.mark.slow
def test_again_the_same_bits(run, tmp_path):
    assert cli.main([*TINY, "--out", str(tmp_path / "again")]) == 0
    for name in FILES - {"metrics.jsonl", "run.json"}:
        assert (run / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    assert last_bytes(run) == last_bytes(tmp_path / "again")
    assert read(run) == read(tmp_path / "again")


def trained(options):
    """Train, and return the measurements of the steps, the final state and the results."""
    run, training = train.start(options)
    steps = []
    for _ in range(options.steps):
        training, step = train.take(run, training)
        steps.append(step)
    return steps, training, train.measure(run, training, print)


def test_two_ranks_are_one_process(run):
    options = Options(codes=8, dim=4, hidden=8, patch=8, steps=3, batch=7, mesh="dp=2")
    for steps, training, (result, *_) in ranks.run(2, trained, options):
        assert_close(training, last_state(run), 1e-5)
        for got, wanted in zip(steps, read(run), strict=True):
            assert all(getattr(got, name) == pytest.approx(x, abs=1e-5) for name, x in wanted.items())
        wanted = json.loads((run / "result.json").read_text())
        assert all(getattr(result, name) == pytest.approx(x, abs=1e-4) for name, x in wanted.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantiser, layers, mesh",
    [
        ("cosine", 1, "fsdp=3"),
        ("fsp", 1, "dp=2"),
        ("lfq", 1, "fsdp=2"),
        ("fsq", 2, "dp=2"),
        ("lfq", 2, "dp=2"),
        ("vq", 1, "dp=2,fsdp=2"),
        ("learnt", 1, "dp=2"),
        ("simvq", 2, "dp=2"),
        ("implicit", 2, "fsdp=2"),
        ("latent", 1, "dp=2"),
    ],
    ids=str,
)
def test_a_mesh_is_one_process(quantiser, layers, mesh):
    options = Options(quantiser, codes=8, layers=layers, dim=4, hidden=8, patch=8, steps=3, batch=7)
    size = math.prod(axes_in(mesh).values())
    ((steps, training, (result, counts, books)),) = ranks.run(1, trained, options, timeout=TRACED)
    options = dataclasses.replace(options, mesh=mesh)
    for found, other, (figures, usage, again) in ranks.run(size, trained, options, timeout=TRACED):
        assert_close((other, again), (training, books), 1e-5)
        assert (usage - counts).abs().sum() <= 4  # a row at equal distance from two codes may have either
        assert [step.loss for step in found] == pytest.approx([step.loss for step in steps], abs=1e-5)
        assert figures.psnr == pytest.approx(result.psnr, abs=1e-4)


# --- the command


def test_help(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    printed = capsys.readouterr().out
    assert left.value.code == 0
    assert all(f" {name}, " in printed for name in typing.get_args(quantisers.Name))  # with a description each
    for option in ("--quantiser", "--codes", "--patch", "--steps", "--batch", "--mesh", "--seed", "--out", "--resume"):
        assert option in printed


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_processes_of_its_own_and_torchruns(torchrun, tmp_path):
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    args = [*start, "-m", "examples.vqvae", *TINY, "--mesh", "dp=2", "--out", tmp_path / "run"]
    ran = subprocess.run(
        [sys.executable, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert {p.name for p in (tmp_path / "run").iterdir()} == FILES | {"checkpoints"}
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["ranks"]) == 2


BAD = {
    "--stepz 3": "--stepz is no option; did you mean --steps?",
    "--steps 0": "--steps is 0; wanted at least 1",
    "--hidden 1": "--hidden is 1; wanted at least 2",
    "--lr nan": "--lr is nan",
    "--patch 6": "--patch is 6; wanted a multiple of 4",
    "--patch 128": "--patch is 128; wanted 1 to 90",
    "--codes 1": "--codes is 1; wanted at least 2",
    "--codes 22 --quantiser fsq": "--codes is 22, no product",
    "--codes 20 --quantiser lfq": "--codes is 20; wanted a power of 2, use 16",
    "--layers 2 --quantiser cosine": "--layers is 2; wanted 1, or more of --quantiser vq, learnt, simvq, ",
    "--groups 2 --quantiser fsp": "--groups is 2; wanted 1, or more of --quantiser vq, ",
    "--groups 3": "--groups is 3; wanted a number that divides --dim 4",
    "--quantiser implicit": "--layers is 1; wanted 2 or more of --quantiser implicit",
    "--save-every 0": "--save-every is 0; wanted at least 1",
    "--resume elsewhere": "--resume continues in its own folder; leave out --out",
    "--mesh tp=2": "axis 'tp' is unknown",
    "--batch 1 --mesh dp=2": "--batch is 1 over 2 ranks",
}


@pytest.mark.parametrize("args", BAD)
def test_bad_option(args, tmp_path, capsys):
    refused(capsys, BAD[args], *TINY, "--out", tmp_path / "run", *args.split())


def test_folder_that_is_taken(tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    assert cli.main([*TINY, "--out", str(tmp_path)]) == 2
    assert "is not empty; choose another folder" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def refused(capsys, said, *args):
    """Check for exit status 2, one line of error that contains ``said``, and nothing written."""
    args = [str(arg) for arg in args]
    assert cli.main(args) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and err.startswith("vqvae: "), err
    assert not Path(args[args.index("--out") + 1]).exists()
