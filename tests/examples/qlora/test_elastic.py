"""A run whose ranks die, under torchrun and under its own launcher: it goes on from the last whole checkpoint."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.sharding.checkpoints import last_bytes

pytestmark = pytest.mark.xdist_group("qlora")
ROOT = Path(__file__).parents[3]
STEPS = 30
SMALL = ["--rank", "4", "--seq", "32", "--batch", "6", "--holdout", "4", "--steps", STEPS, "--dropout", "0.1"]
SAME = ["--lr", "0.01", "--dtype", "f32", "--checkpoint", "none"]
LIMIT = 240.0  # seconds of a run
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


def start(*command):
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, command)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


@contextlib.contextmanager
def ended(processes):
    """Kill what is left of the processes, each of which leads a session, and of their children."""
    try:
        yield processes
    finally:
        for each in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            if not each.stdout.closed:  # its end has not been waited for
                each.communicate()


def agents(count, least, args):
    """Start an agent of torchrun for each of ``count`` machines of one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [
        "torch.distributed.run", f"--nnodes={least}:{count}", "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic",
        "--monitor-interval=0.1", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    hosts = [[*torchrun, f"--rdzv-conf={RENDEZVOUS},is_host={int(i == 0)}"] for i in range(count)]
    return [start(*each, "-m", "examples.qlora", *args, "--elastic") for each in hosts]


def steps(folder):
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True)]
    return []


def pids(folder):
    with contextlib.suppress(FileNotFoundError):
        return {rank["rank"]: rank["pid"] for rank in json.loads((folder / "run.json").read_text())["ranks"]}
    return {}


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def await_(condition, processes):
    """Wait until ``condition()``; return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        over = [each.communicate()[0] for each in processes if each.poll() is not None]
        assert not over and time.monotonic() - began < LIMIT, over
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def whole(model, text, tmp_path_factory):
    """The options of a run, and its folder after it was not disturbed on two ranks."""
    args, out = ["--model", model, "--data", text, *SMALL, *SAME], tmp_path_factory.mktemp("whole") / "run"
    with ended([start("examples.qlora", *args, "--out", out)]) as (process,):
        printed, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, printed
    return args, out


def same(out, cut):
    adapter = "adapter/adapter_model.safetensors"
    assert last_bytes(out) == last_bytes(cut) and (out / adapter).read_bytes() == (cut / adapter).read_bytes()
    assert [s["loss"] for s in steps(out)] == [s["loss"] for s in steps(cut)]
    assert [s["step"] for s in steps(cut)] == list(range(STEPS)) and not list(cut.rglob("*.tmp"))


@pytest.mark.slow
def test_a_worker_dies_under_torchrun(whole, tmp_path):
    """The ranks' restart counts differ afterwards; the run has the bits of one that was not disturbed."""
    args, out = whole
    cut = tmp_path / "cut"
    with ended(agents(2, 2, [*args, "--out", cut])) as running:
        await_(lambda: len(steps(cut)) > 5, running)
        before = pids(cut)
        os.kill(before[1], signal.SIGKILL)
        await_(lambda: pids(cut) != before, running)
        printed = [each.communicate(timeout=LIMIT)[0] for each in running]
        assert [each.returncode for each in running] == [0, 0], "\n".join(printed)
    assert "rank 1 has gone" in "".join(printed)
    same(out, cut)


@pytest.mark.slow
def test_a_machine_is_lost_under_torchrun(whole, tmp_path):
    """Three ranks go on as two, and the run has the bits of one that was not disturbed."""
    args, out = whole
    cut = tmp_path / "cut"
    with ended(agents(3, 2, [*args, "--out", cut])) as running:
        await_(lambda: len(pids(cut)) == 3 and len(steps(cut)) > 5, running)
        lost = running[-1]  # the first hosts the rendezvous
        (worker,) = [pid for pid in pids(cut).values() if parent(pid) == lost.pid]
        os.killpg(lost.pid, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        rest = running[:-1]
        await_(lambda: len(pids(cut)) == 2, rest)
        printed = [each.communicate(timeout=LIMIT)[0] for each in rest]
        assert [each.returncode for each in rest] == [0, 0], "\n".join(printed)
    same(out, cut)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_is_killed_at_a_random_moment(whole, tmp_path, seed):
    args, out = whole
    draw, cut = random.Random(seed), tmp_path / "cut"
    command = ["examples.qlora", *args, "--out", cut, "--save-every", "1", "--restarts", "2"]
    with ended([start(*command)]) as running:
        for _ in range(2):
            before = pids(cut)
            await_(lambda before=before: pids(cut) != before, running)
            count = len(steps(cut))
            await_(lambda count=count: len(steps(cut)) > count or len(steps(cut)) < count, running)
            count, more = len(steps(cut)), draw.randint(1, STEPS // 5)
            seconds = await_(lambda least=count + more: len(steps(cut)) >= least, running)
            time.sleep(draw.uniform(0, seconds / more))  # within a step, however fast the machine is
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids(cut)[draw.randrange(2)], signal.SIGKILL)
        printed, _ = running[0].communicate(timeout=LIMIT)
        assert running[0].returncode == 0, printed
    same(out, cut)


@pytest.mark.slow
def test_ctrl_c_leaves_with_a_checkpoint(whole, tmp_path):
    """A terminal sends it to the launcher and to its ranks, and the launcher sends it to the ranks again."""
    args, out = whole
    cut = tmp_path / "cut"
    with ended([start("examples.qlora", *args, "--out", cut)]) as (process,):
        await_(lambda: len(steps(cut)) > 3, [process])
        os.killpg(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 130, printed
    assert f"stopped after step {len(steps(cut))}; continue with" in printed
    with ended([start("examples.qlora", "--resume", cut)]) as (process,):
        printed, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, printed
    same(out, cut)
