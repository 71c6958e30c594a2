"""Tests of fquant.io.files.replacing: what killed writers leave is removed, and nothing else."""

import os
import re
import signal
import subprocess
import sys

import pytest

from fquant.io import partial
from fquant.io.files.replacing import is_leftover, remove_leftovers, replacing
from models.export.folder import copy_companions
from tests.helpers.files.full_disk import limited

WRITER = """
import sys, time
from fquant.io.files.replacing import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("here", flush=True)
    time.sleep(60)
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def writer(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "x")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    yield process
    process.kill()
    process.communicate()


def test_what_a_killed_writer_leaves_is_removed(tmp_path, writer):
    (tmp_path / "x").write_bytes(b"old")
    (leftover,) = set(tmp_path.iterdir()) - {tmp_path / "x"}
    assert is_leftover(leftover) and remove_leftovers(tmp_path) == []  # its writer is alive
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    assert leftover.read_bytes() == b"half"
    assert remove_leftovers(tmp_path) == [leftover]
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"old"


def test_this_process_is_alive_too(tmp_path):
    with replacing(tmp_path / "x") as file:
        assert remove_leftovers(tmp_path) == []
        file.write(b"new")
    assert (tmp_path / "x").read_bytes() == b"new" and names(tmp_path) == ["x"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "x") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"old"


OTHERS = [".x.tmp", "x.0123abcd.tmp", ".x.0123abcd", ".x.0123abcde.tmp", ".x.0123ABCD.tmp", ".x.0123abcd.tmp~"]


def test_other_files_stay(tmp_path):
    for name in OTHERS:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".folder.0123abcd.tmp").mkdir()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / ".x.0123abcd.tmp").write_text("of another folder")
    (tmp_path / ".link.0123abcd.tmp").symlink_to(tmp_path / OTHERS[0])
    before = names(tmp_path)
    assert remove_leftovers(tmp_path) == [] and names(tmp_path) == before
    assert names(tmp_path / "inner") == [".x.0123abcd.tmp"]
    assert remove_leftovers(tmp_path / "absent") == []


WRITES = {  # what writes a file of 1 MB, and the name in its error
    "replacing": (lambda path: replaced(path / "x"), "x"),
    "partial": (lambda path: continued(path / "x"), "x.part"),
    "companions": (lambda path: copy_companions(path.parent / "model", path), "tokenizer.json"),
}


def replaced(path):
    with replacing(path) as file:
        file.write(bytes(1 << 20))


def continued(path):
    with partial.continued(path, b"head", ["a"], resume=False) as part:
        part.file.write(bytes(1 << 20))
        part.finish("a", 1 << 20)


@pytest.mark.parametrize(("write", "name"), WRITES.values(), ids=WRITES)
def test_a_full_disk_is_named_and_leaves_no_half_file(tmp_path, write, name):
    for folder in ("model", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes(bytes(1 << 20))
    out = tmp_path / "out"
    with limited(1 << 16), pytest.raises(OSError, match=re.escape(f"'{out / name}'")):
        write(out)
    assert not [path for path in out.iterdir() if path.suffix not in (".part", ".log")]
