"""Temporary folders of launchers: one goes at the end of its process, or when another is made after it was killed."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from examples.common.launch import temporary_folder

ROOT = Path(__file__).parents[4]
PROGRAM = """
import sys, tempfile
from examples.common.launch import temporary_folder
with temporary_folder.used() as folder:
    tempfile.mkstemp()
print(folder, tempfile.gettempdir(), flush=True)
sys.stdin.read()
"""


def start(where):
    """Start a process with a folder in ``where``; return it and the folder."""
    environment = os.environ | {"TMPDIR": str(where), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder, after = process.stdout.readline().split()
    assert after == str(where)  # as before
    return process, Path(folder)


def end(process):
    """Let the process end by itself."""
    process.communicate()
    assert process.returncode == 0


def test_a_folder_goes_with_its_process(tmp_path):
    process, folder = start(tmp_path)
    assert [folder] == list(tmp_path.iterdir()) and len(list(folder.iterdir())) == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    end(process)
    assert not list(tmp_path.iterdir())


def test_folders_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path):
    for other in ("fquant-notes", "fquant-0123456789", "pymp-12345678"):
        (tmp_path / other).mkdir()
    others = set(tmp_path.iterdir())
    killed, left = start(tmp_path)
    living, stays = start(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.is_dir()
    another, new = start(tmp_path)
    assert set(tmp_path.iterdir()) == {stays, new, *others}
    end(living)
    end(another)
    assert set(tmp_path.iterdir()) == others


def test_one_folder_a_process():
    before = tempfile.gettempdir()
    with temporary_folder.used() as first, temporary_folder.used() as nested:
        pass
    with pytest.raises(ZeroDivisionError), temporary_folder.used() as again:
        _ = 1 / 0
    assert first == nested == again and tempfile.gettempdir() == before
