"""Ranks end with their launcher, however it ends; the one that failed is named, and none stands still for another."""

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from examples.common.launch import ranks

ROOT = Path(__file__).parents[4]
JOB = textwrap.dedent("""
    import os, sys, time
    from pathlib import Path
    from examples.common import launch

    @launch.record
    def work(folder):
        Path(folder, f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
        time.sleep(120)

    if __name__ == "__main__":
        launch.local(2, work, sys.argv[1])
""")


def lives(pid: int) -> bool:
    """Return True if the process runs; one that has ended may wait for its parent."""
    if Path("/proc").is_dir():
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def await_(condition, seconds):
    """Wait until ``condition()``; return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.02)
    return time.monotonic() - start


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_ranks_end_with_the_launcher(tmp_path, how):
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    launcher = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    files, pids = [tmp_path / f"rank{rank}" for rank in range(2)], []
    try:
        await_(lambda: all(file.exists() and file.read_text() for file in files), 100)
        pids = [int(file.read_text()) for file in files]
        assert all(map(lives, pids))
        launcher.send_signal(how)
        assert await_(lambda: not any(map(lives, pids)), 10) < 2.0  # a second, and one for a busy machine
    finally:
        launcher.kill()
        launcher.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


FROZEN = textwrap.dedent("""
    import os, signal, sys, time
    from examples.common import launch

    @launch.record
    def work():
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1.0)
        raise RuntimeError("rank 1 has not answered")

    if __name__ == "__main__":
        try:
            launch.local(2, work)
        except launch.RankFailed as error:
            print(error)
""")


def test_the_error_beside_a_stopped_rank_is_one_line(tmp_path):
    (tmp_path / "job.py").write_text(FROZEN)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, str(tmp_path / "job.py")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    (said,) = found.stdout.splitlines()
    assert said.startswith("rank 0 ") and said.endswith("exit status 1: RuntimeError: rank 1 has not answered")


def freezes():
    os.kill(os.getpid(), signal.SIGSTOP)


def fails():
    sys.exit(3)


def test_a_stopped_rank_is_killed_when_another_has_failed():
    """A signal to end would not reach it, so that all would wait for it."""
    context = multiprocessing.get_context("spawn")
    frozen, failed = context.Process(target=freezes, daemon=True), context.Process(target=fails)
    died = dict[int, Any]()
    try:
        with ranks._watched(2, died):
            frozen.start()
            failed.start()
            frozen.join(60)
        assert (frozen.exitcode, failed.exitcode) == (-signal.SIGKILL, 3)
        assert not died  # by a signal from elsewhere
    finally:
        frozen.kill()


KILLED = textwrap.dedent("""
    import os, signal, sys, time
    from pathlib import Path
    from examples.common import launch

    @launch.record
    def work(folder):
        if os.environ["RANK"] == "1":
            time.sleep(2.0)
            Path(folder, "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while not Path(folder, "killed").exists():
            pass
        os._exit(1)  # before the launcher looks, so that both ranks have failed then

    if __name__ == "__main__":
        try:
            launch.local(2, work, sys.argv[1])
        except launch.RankFailed as error:
            print(error)
""")


@pytest.mark.parametrize("attempt", range(3))
def test_the_rank_that_was_killed_is_named_and_not_one_that_noticed(tmp_path, attempt):
    (tmp_path / "job.py").write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert re.fullmatch(r"rank 1 \(pid \d+\) was killed by SIGKILL; the other ranks were stopped\n", found.stdout)


KILLED_AT_END = """
    import multiprocessing, os, signal, time
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
    from examples.common.launch import ranks

    @ranks.record
    def ends(): return os.getpid()

    is_done = MultiprocessContext._is_done

    def killed(context):  # behind the agent's look at the ranks, before it lets them go
        if done := is_done(context):
            time.sleep(0.5)
            os.kill(context._return_values[0], signal.SIGKILL)
            while context._pc.processes[0].is_alive(): time.sleep(0.01)
        return done

    if __name__ == "__main__":
        MultiprocessContext._is_done = killed
        try: print(ranks.local(2, ends))
        except ranks.RankFailed as error: print(error)
        MultiprocessContext._is_done = is_done
        print(ranks.local(2, ends) > 0, type(multiprocessing.get_context("forkserver").Event()).__module__)
    """


def test_a_rank_that_is_killed_when_all_have_ended_is_named(tmp_path):
    """It waits for the others. The launcher is not to wait for it, and the next ranks end."""
    (tmp_path / "job.py").write_text(textwrap.dedent(KILLED_AT_END))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, str(tmp_path / "job.py")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    named, again = found.stdout.splitlines()
    assert re.fullmatch(r"rank 0 \(pid \d+\) was killed by SIGKILL; the other ranks were stopped", named)
    assert again == "True multiprocessing.synchronize"


def test_what_a_rank_has_imported_is_not_collected_again():
    """To visit it takes Python's collector half a second, in which every other rank waits."""
    assert ranks.local(2, gc.get_freeze_count) > 100_000
