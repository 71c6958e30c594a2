"""examples.common.model_folders: one process at a time writes an OUT, and an interrupted run goes on as it began."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from examples import export, merge, quantize
from fquant import lora, random, tree
from fquant.io import peft
from fquant.io.partial import Part
from models import hf
from models.export import folder
from tests.helpers.files.holders import holding

PROGRAMS = {
    "quantize": (quantize.main, "model out"),
    "quantize --resume": (quantize.main, "model out --resume"),
    "merge": (merge.main, "model adapter out"),
    "merge --resume": (merge.main, "model adapter out --resume"),
    "gguf": (export.main, "model out --to gguf"),
    "folder": (export.main, "model out --to merged --resume"),
    "adapter": (export.main, "model out --to adapter"),
}


@pytest.mark.parametrize(("main", "args"), PROGRAMS.values(), ids=PROGRAMS)
def test_an_output_that_another_process_writes_is_refused(main, args, tmp_path, capsys, monkeypatch):
    """It names the process, before it reads the model, by any name of the place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with holding(tmp_path / ".out.lock") as process:
        for place in ("out", str(tmp_path / "link" / "out")):
            assert main(args.replace("out", place, 1).split()) == 2
            said = capsys.readouterr().err
            assert ".out.lock: is in use by host " in said and f"process {process.pid}, since" in said
    assert main(args.split()) == 2 and "is in use" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    cfg, params = hf.load(model)
    made = lora.init(params, r"layers\.0\.q", rank=2, key=0)
    made = {path: tree.map(lambda t: random.normal(random.key(1), tuple(t.shape)), x) for path, x in made.items()}
    at = tmp_path_factory.mktemp("adapter") / "adapter"
    peft.save(at, made, partial(hf.module_name, cfg=cfg))
    return at


def stopping(f, after):
    """Return ``f``, which raises at one call, as of a disk that is full."""
    calls = []

    def stopped(*args, **more):
        calls.append(args)
        if len(calls) == after:
            raise OSError("disk full")
        return f(*args, **more)

    return stopped


def rewritten(path, old=b"", new=b""):
    """Return a function that changes a file; by default the last bit of its data."""
    data = path.read_bytes()
    return lambda: path.write_bytes(data.replace(old, new, 1) if old else data[:-1] + bytes([data[-1] ^ 1]))


CONVERSIONS = {
    "packed": (merge.main, "model adapter OUT --format int8"),
    "plain": (merge.main, "model adapter OUT --shard 0.00001"),
    "gguf": (export.main, "model OUT --kind q8_0 --adapter adapter"),
}
CHANGES = {
    "weight": lambda: rewritten(Path("model/model.safetensors"))(),
    "adapter": lambda: rewritten(Path("adapter/adapter_model.safetensors"))(),
    "config": lambda: rewritten(Path("model/config.json"), b"10000.0", b"20000.0")(),
    "tokenizer": lambda: rewritten(Path("model/tokenizer.json"), b"true", b"false")(),
}


@pytest.fixture
def begun(model, adapter, tmp_path, monkeypatch):
    """Return a function that interrupts a conversion of a copy of the model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "model")
    shutil.copytree(adapter, "adapter")

    def begin(kind):
        main, args = CONVERSIONS[kind]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Part, "finish", stopping(Part.finish, 9))
            patch.setattr(folder.safetensors, "write", stopping(folder.safetensors.write, 4))
            assert main(args.replace("OUT", "out").split()) == 2
        return lambda *more: main([*args.replace("OUT", "out").split(), "--resume", *more])

    return begin


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_an_interrupted_run_of_other_inputs_is_refused(kind, change, begun, tmp_path, capsys):
    """Also where no sample of what it has written would tell."""
    resumed = begun(kind)
    CHANGES[change]()
    capsys.readouterr()
    assert resumed() == 2
    printed = capsys.readouterr().err
    assert f"{tmp_path}/{'adapter' if change == 'adapter' else 'model'}/" in printed
    assert "when the run began, and is" in printed and "restore it, or remove out and what was written" in printed


def test_an_interrupted_run_of_other_options_is_refused(begun, capsys):
    resumed = begun("plain")
    for more, fault in ((("--scales", "0.5"), "--scales was () when"), (("--dtype", "f32"), "--dtype was None when")):
        assert resumed(*more) == 2 and f"out: {fault} the run began" in capsys.readouterr().err
    os.remove(".out.inputs")
    assert resumed() == 2 and ".out.inputs: is not there, so nothing says what" in capsys.readouterr().err


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_an_interrupted_run_goes_on_and_leaves_no_record(kind, begun, capsys):
    main, args = CONVERSIONS[kind]
    assert begun(kind)() == 0 and main(args.replace("OUT", "whole").split()) == 0
    assert sorted(os.listdir()) == ["adapter", "model", "out", "whole"]
    files = lambda at: {p.name: p.read_bytes() for p in (at.iterdir() if at.is_dir() else [at])}
    assert list(files(Path("out")).values()) == list(files(Path("whole")).values())


def test_a_file_without_a_finished_piece_is_begun_again_with_a_new_record(begun, capsys):
    begun("gguf")
    os.truncate("out.part.log", 0)  # as a power failure may leave it
    CHANGES["tokenizer"]()
    assert begun("gguf")() == 0, capsys.readouterr().err


def test_an_interrupted_file_is_not_begun_again(begun, capsys):
    resumed = begun("gguf")
    CHANGES["tokenizer"]()
    main, args = CONVERSIONS["gguf"]
    assert main(args.replace("OUT", "out").split()) == 2
    assert "got the file of an interrupted run" in capsys.readouterr().err
    assert resumed() == 2 and "model/tokenizer.json was" in capsys.readouterr().err
