"""A lock has one holder, whom others name; it ends with that process."""

import os
import re
import shutil
import subprocess
import sys
from socket import gethostname

import pytest

from fquant.io.files import locking
from tests.helpers.files.holders import holding


def test_a_second_process_says_who_holds_it(tmp_path):
    """A killed one holds nothing, and one that ends within the time is waited for."""
    path = tmp_path / "run" / ".lock"
    with holding(path) as process:
        who = re.escape(f"{path}: is in use by host {gethostname()}, process {process.pid}, since ")
        with pytest.raises(ValueError, match=who + r"\d{4}(-\d\d){2} \d\d(:\d\d){2}; wait until it ends, or"):
            locking.held(path).__enter__()
    assert path.exists()
    with locking.held(path):
        assert f"process {os.getpid()}" in path.read_text()
    assert path.parent.exists() and not path.exists()  # a folder that was there stays
    with holding(path, 0.5), locking.held(path, 30):
        pass


def test_a_folder_that_stays_empty_is_removed(tmp_path):
    for name in ("", "kept"):
        with pytest.raises(KeyError), locking.held(tmp_path / "new" / ".lock"):
            if name:
                (tmp_path / "new" / name).touch()
            raise KeyError
        assert (tmp_path / "new").exists() == bool(name)


def test_a_folder_that_is_made_again_has_a_lock_of_its_own(tmp_path):
    path = tmp_path / "run" / ".lock"
    with locking.held(path):
        shutil.rmtree(path.parent)
        with holding(path):
            with pytest.raises(ValueError, match="is in use by"):
                locking.held(path).__enter__()
    assert path.exists()


@pytest.mark.parametrize("place", ["file/.lock", "file/run/.lock"])
def test_a_place_that_cannot_be_written(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"\.lock: cannot be made \(.+\); choose a place"):
        locking.held(tmp_path / place).__enter__()


COUNT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import locking
locking.POLL, root = 0.001, Path(sys.argv[2])
for _ in range(100):
    with locking.held(root / ".lock", 60):
        (root / "count").write_text(str(int((root / "count").read_text()) + 1))
"""


def test_one_of_many_holds_it(tmp_path):
    """Though each removes the file when it ends."""
    (tmp_path / "count").write_text("0")
    command = [sys.executable, "-c", COUNT, os.path.dirname(locking.__file__), str(tmp_path)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert (tmp_path / "count").read_text() == "400"
