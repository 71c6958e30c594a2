"""Processes that hold a lock of fquant/io/files/locking.py until they are killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fquant.io.files import locking

SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])  # without torch
import locking
with locking.held(Path(sys.argv[2])):
    print(flush=True)
    time.sleep(float(sys.argv[3]))
"""


@contextmanager
def holding(path: Path, seconds: float = 1000.0) -> Iterator[subprocess.Popen[str]]:
    """Give a process that holds ``path`` for some seconds, and kill it at the end of the block."""
    command = [sys.executable, "-c", SCRIPT, os.path.dirname(locking.__file__), str(path), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process
        process.kill()
