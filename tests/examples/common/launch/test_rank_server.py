"""The server of ranks: they are forked where a fork is safe, and get the signals that all processes get."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
# A rank's parent is the server. In it the job is imported; each rank prints what it finds there, and then waits.
JOB = textwrap.dedent("""
    import os, signal, time
    from pathlib import Path
    from examples.common import launch
    from examples.common.launch import interrupts

    IMPORTED_BY = os.getpid()

    @launch.record
    def work(folder):
        with interrupts.noticed() as signals:
            parent = Path(f"/proc/{os.getppid()}/status").read_text().splitlines()
            (threads,) = (line.split()[1] for line in parent if line.startswith("Threads:"))
            facts = f"{os.getpid()} {os.getppid()} {IMPORTED_BY} {threads}"
            new = Path(folder, f".rank{os.environ['RANK']}")
            new.write_text(facts)
            new.rename(Path(folder, new.name[1:]))
            for _ in range(1200):
                if signals.number:
                    Path(folder, f"left{os.environ['RANK']}").write_text(str(signals.number))
                    raise launch.Stopped("stopped", signal.Signals(signals.number))
                time.sleep(0.05)
""")
MAIN = textwrap.dedent("""
    import sys
    import job
    from examples.common import launch

    if __name__ == "__main__":
        launch.import_early("job")
        try:
            launch.local(2, job.work, sys.argv[1])
        except launch.Stopped as stopped:
            print(stopped.sigval.name)
        except KeyboardInterrupt:
            print("before the ranks")
""")

# A program in the background of a shell, as tests may be, ignores Ctrl-C.
INTERRUPTIBLE = textwrap.dedent("""
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
""")


@contextlib.contextmanager
def started(tmp_path, temporary):
    """Start the job in a session of its own, of which nothing lives on."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "main.py").write_text(MAIN)
    temporary.mkdir(parents=True)
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "TMPDIR": str(temporary)}
    path["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)  # torch makes it, among the temporary files otherwise
    job = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, str(tmp_path / "main.py"), str(tmp_path)], env=os.environ | path,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def facts(tmp_path, job):
    """Return what each rank found, once both have begun."""
    files, began = [tmp_path / f"rank{rank}" for rank in range(2)], time.monotonic()
    while not all(file.exists() for file in files):
        assert job.poll() is None and time.monotonic() - began < 100
        time.sleep(0.02)
    return [tuple(map(int, file.read_text().split())) for file in files]


@pytest.fixture
def short(tmp_path_factory):
    """Return a path of a folder in which the server's socket can be."""
    return tmp_path_factory.getbasetemp() / "s"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads processes from /proc")
def test_ranks_are_forked_by_a_server_without_threads(tmp_path, short):
    with started(tmp_path, short / "1") as job:
        found = facts(tmp_path, job)
        for pid, parent, imported_by, threads in found:
            assert imported_by == parent != job.pid and pid != parent and threads == 1
        for pid, *_ in found:
            os.kill(pid, signal.SIGTERM)
        assert job.communicate(timeout=100)[0] == "SIGTERM\n"
    assert not list((short / "1").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_all_processes_reaches_the_ranks(tmp_path, short, number):
    """As a batch system or a terminal sends it. The server stays, for it knows how its ranks end."""
    with started(tmp_path, short / number.name) as job:
        facts(tmp_path, job)
        os.killpg(job.pid, number)
        said = job.communicate(timeout=100)[0]
    assert said == f"{number.name}\n"  # and nothing of the server
    assert [(tmp_path / f"left{rank}").read_text() for rank in range(2)] == [str(number.value)] * 2
    assert not list((short / number.name).iterdir())


def test_ctrl_c_while_the_server_imports_says_nothing_of_it(tmp_path, short):
    with started(tmp_path, short / "early") as job:
        while not list((short / "early").glob("fquant-*/pymp-*/*")):  # the socket, just before the server starts
            assert job.poll() is None
            time.sleep(0.01)
        time.sleep(0.5)
        os.killpg(job.pid, signal.SIGINT)
        said = job.communicate(timeout=100)[0]
    assert said == "before the ranks\n"


def test_ranks_import_for_themselves_where_the_path_is_too_long_for_a_socket(tmp_path):
    with started(tmp_path, tmp_path / ("long" * 20)) as job:
        found = facts(tmp_path, job)
        for pid, parent, imported_by, _ in found:
            assert parent == job.pid and imported_by == pid
            os.kill(pid, signal.SIGTERM)
        assert job.communicate(timeout=100)[0] == "SIGTERM\n"
