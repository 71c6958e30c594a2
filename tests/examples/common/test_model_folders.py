"""examples.common.model_folders: one process at a time writes an OUT."""

import pytest

from examples import export, merge, quantize
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
