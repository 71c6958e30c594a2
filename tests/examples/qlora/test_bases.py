"""The bases that examples.qlora takes: every family, and folders that are quantised already."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest

from examples.qlora import cli, fitting, train
from examples.qlora.options import Options
from fquant import NF4_DQ, Packed, lazy, tree
from models import decoder, hf
from models.export import bitsandbytes
from tests.helpers.hf_models import CONFIGS
from tests.helpers.model_folders import tiny_model

SMALL = {"rank": 2, "seq": 32, "batch": 4, "holdout": 4}


def refused(capsys, said, folder, **options):
    """Exit status 2, and one line that holds ``said``."""
    values = {"model": folder, **SMALL, **options}
    assert cli.main([word for name, value in values.items() for word in (f"--{name}", str(value))]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and err.startswith("qlora: "), err


@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen3_moe", "gemma3_text", "gpt_oss"])
def test_every_linear_of_every_family_is_packed_and_adapted(family, text, tmp_path, capsys):
    """All matrices of layers but routers; what PEFT cannot hold is refused before anything is trained."""
    cfg = next(cfg for cfg in CONFIGS.values() if cfg.family == family)
    cfg = dataclasses.replace(cfg, vocab=4096, dim=64, hidden=64, expert_hidden=64 if cfg.expert_hidden else None)
    folder = tiny_model(tmp_path / "model", cfg)
    args = {"data": text, "format": "int8"}
    if cfg.num_experts:
        said = "--dropout is 0.1, but PEFT has none for adapters of experts; use --targets q,k,v,o"
        refused(capsys, said, folder, out=tmp_path / "run", dropout=0.1, **args)
    work = train.prepare(Options(model=folder, **SMALL, **args))
    is_packed = lambda leaf: isinstance(leaf.like, Packed)
    packed = {path for path, leaf in tree.items(work.packed) if is_packed(leaf)}
    matrices = {path for path, t in tree.items(decoder.shapes(cfg)) if "layers" in path and t.ndim > 1}
    matrices -= {path for path in matrices if path.endswith(("router", "_bias"))}
    assert packed == matrices
    assert work.adapters.keys() == matrices


@pytest.fixture
def quantised_folder(model, tmp_path):
    """The model as a bitsandbytes folder, with its tokenizer."""
    cfg, params = hf.load(model)
    special = {key: json.loads((model / "config.json").read_text())[key] for key in ("bos_token_id", "eos_token_id")}
    bitsandbytes.save(tmp_path / "bitsandbytes", cfg, params, NF4_DQ, extra=special)
    shutil.copy(model / "tokenizer.json", tmp_path / "bitsandbytes")
    return tmp_path / "bitsandbytes"


def test_a_folder_that_is_quantised_is_the_base(model, quantised_folder, text, tmp_path, capsys):
    """With --format none the base, the adapters and the price are those of the dense folder and --format nf4_dq."""
    said = "layers.0.q: is packed in nf4_dq already, and --format is fp4; use --format none, which keeps it"
    refused(capsys, said, quantised_folder, data=text, format="fp4", out=tmp_path / "run")
    both = [
        Options(model=folder, data=text, format=format, **SMALL)
        for folder, format in ((model, "nf4_dq"), (quantised_folder, "none"))
    ]
    ours, theirs = (train.prepare(options) for options in both)
    for a, b in ((ours.packed, theirs.packed), (ours.adapters, theirs.adapters)):
        a, b = lazy.read(a), lazy.read(b)
        assert tree.structure(a) == tree.structure(b)
        assert all(x.equal(y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))
    jobs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fitting.pricing, "price", lambda job, axes, device: jobs.append(job) or SimpleNamespace(peak=0, base=0)
        )
        for options in both:
            fitting.choose_checkpoint(options, {"fsdp": 1})
    a, b = (tree.items(job.base, is_leaf=lambda x: isinstance(x, Packed)) for job in jobs)
    assert [(path, type(x), tree.nbytes(x)) for path, x in a] == [(path, type(x), tree.nbytes(x)) for path, x in b]
