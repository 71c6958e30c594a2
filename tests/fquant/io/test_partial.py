"""Tests of fquant.io.partial: whatever interrupts a file, continuing it gives the bytes of one call."""

import os
import signal
import subprocess
import sys

import pytest

from fquant.io import partial

PIECES = {f"piece {i}\n": bytes([i]) * 1000 for i in range(8)}  # a name may have any letters
HEAD = b"head"


def write(path, resume=False, stop=None, error=OSError, head=HEAD, pieces=PIECES):
    """Write the file; return the pieces that were written by this call."""
    written = []
    with partial.continued(path, head, pieces, resume) as part:
        for i, (name, raw) in enumerate(pieces.items()):
            if name not in part.finished:
                if i == stop:
                    raise error("stop")
                part.file.seek(len(head) + 1000 * i)
                part.file.write(raw)
                part.finish(name, len(raw))
                written.append(name)
    return written


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("stops", [(1,), (7,), (3, 5), (2, 2, 6)])
def test_a_continued_file_is_that_of_one_call(tmp_path, stops, error):
    path = tmp_path / "file"
    for i, stop in enumerate(stops):
        with pytest.raises(error):
            write(path, i > 0, stop, error)
        assert names(tmp_path) == ["file.part", "file.part.log"]
    assert write(path, resume=True) == list(PIECES)[stops[-1] :]
    assert path.read_bytes() == HEAD + b"".join(PIECES.values()) and names(tmp_path) == ["file"]


def test_a_new_run_that_would_end_so_again_leaves_nothing(tmp_path):
    for error, stop in ((ValueError, 4), (TypeError, 4), (OSError, 0)):
        with pytest.raises(error):
            write(tmp_path / "file", stop=stop, error=error)
        assert not names(tmp_path)


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError):
        write(tmp_path / "file", stop=4)
    assert (tmp_path / "file").read_text() == "old"
    write(tmp_path / "file", resume=True)
    assert len((tmp_path / "file").read_bytes()) == 8004


def test_refused(tmp_path):
    """An interrupted file is neither overwritten nor continued as another one, and outlives each refusal."""
    path = tmp_path / "file"
    with pytest.raises(OSError):
        write(path, stop=4)
    with pytest.raises(ValueError, match="file.part: got the file of an interrupted run; resume that, or remove"):
        write(path)
    with pytest.raises(ValueError, match="file.part: got a file with another beginning"):
        write(path, resume=True, head=b"HEAD")
    with pytest.raises(ValueError, match="stop"):
        write(path, resume=True, stop=6, error=ValueError)
    assert write(path, resume=True) == list(PIECES)[6:]


def test_a_torn_log_is_read_up_to_its_last_whole_line(tmp_path):
    for keep in range(1, 140, 9):
        path = tmp_path / f"file{keep}"
        with pytest.raises(OSError):
            write(path, stop=6)
        log = tmp_path / f"file{keep}.part.log"
        raw = log.read_bytes()
        log.write_bytes(raw[:keep])
        left = len(PIECES) - max(0, raw[:keep].count(b"\n") - 1)
        assert len(write(path, resume=True)) == left
        assert path.read_bytes() == HEAD + b"".join(PIECES.values())


def test_a_file_that_got_its_name_before_it_was_locked_stays(tmp_path, monkeypatch):
    """A second writer opens the file of a first, which ends before the second locks it."""
    path, flock = tmp_path / "file", partial.fcntl.flock

    def late(file, how):
        if (part := tmp_path / "file.part").exists() and not path.exists():
            part.rename(path)
        flock(file, how)

    monkeypatch.setattr(partial.fcntl, "flock", late)
    (tmp_path / "file.part").write_bytes(b"whole")
    with pytest.raises(OSError):
        write(path, stop=2)
    assert path.read_bytes() == b"whole" and names(tmp_path) == ["file", "file.part", "file.part.log"]


def test_what_a_log_alone_says_is_not_believed(tmp_path):
    """A file that was killed between its name and the end of its log is written anew."""
    with pytest.raises(OSError):
        write(tmp_path / "file", stop=4)
    (tmp_path / "file.part").unlink()
    assert write(tmp_path / "file") == list(PIECES) and names(tmp_path) == ["file"]


PROGRAM = """
import sys, time
from fquant.io import partial
partial.BETWEEN = 2000
with partial.continued(sys.argv[1], b"head", [str(i) for i in range(8)], False) as part:
    for i in range(5):
        part.file.write(bytes([i]) * 1000)
        part.finish(str(i), 1000)
    print("written", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_is_continued(tmp_path):
    """While it lives the file is refused, with and without resume, and stays as it is."""
    path, pieces = tmp_path / "file", {str(i): bytes([i]) * 1000 for i in range(8)}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, path], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"written\n"
        for resume in (False, True):
            with pytest.raises(ValueError, match=r"file.part: another process is writing it; wait for that, or choose"):
                write(path, resume, pieces=pieces)
        os.kill(process.pid, signal.SIGKILL)
    assert write(path, resume=True, pieces=pieces) == [str(i) for i in range(4, 8)]  # the fifth was not in the log
    assert path.read_bytes() == HEAD + b"".join(pieces.values())
