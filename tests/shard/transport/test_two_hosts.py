"""torchrun on two hosts: two network namespaces of one machine, with a virtual cable between them.

Each host is a namespace with an address of its own, so a rank reaches the other through the cable only. It needs the
rights of root and iproute2, and is skipped without.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from shard.transport import desync

ROOT = Path(__file__).parents[3]
START = 240.0  # seconds for a job to start and run
LIMIT = 10.0  # seconds in which a cut is named
HOSTS = ("a", "b")
SLOW = ("tbf", "rate", "16mbit", "burst", "32kb", "latency", "400ms")


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=20)


class Cable:
    """Two hosts and the cable between them; names are of this process, since other tests may have hosts too."""

    def __init__(self, folder):
        self.folder = folder
        self.name = f"fq{os.getpid()}"
        self.spaces = {host: f"{self.name}{host}" for host in HOSTS}
        self.ends = {host: f"v{os.getpid()}{host}" for host in HOSTS}
        self.jobs = []

    def lay(self):
        for host in HOSTS:
            ip("netns", "add", self.spaces[host])
        a, b = HOSTS
        ip("link", "add", self.ends[a], "netns", self.spaces[a], "type", "veth", "peer", "name", self.ends[b],
           "netns", self.spaces[b])  # fmt: skip
        for number, host in enumerate(HOSTS, 1):
            ip("-n", self.spaces[host], "addr", "add", f"10.9.0.{number}/24", "dev", self.ends[host])
            for device in (self.ends[host], "lo"):
                ip("-n", self.spaces[host], "link", "set", device, "up")

    def cut(self):
        ip("-n", self.spaces["b"], "link", "set", self.ends["b"], "down")

    def slow(self):
        for host in HOSTS:
            ip("netns", "exec", self.spaces[host], "tc", "qdisc", "add", "dev", self.ends[host], "root", *SLOW)

    def start(self, script, *args):
        """Start the agents of a job of one rank a host; see ``outputs``."""
        for number, host in enumerate(HOSTS, 1):
            torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
            torchrun += ["--rdzv-id=two", "--rdzv-endpoint=10.9.0.1:29400", f"--local-addr=10.9.0.{number}"]
            torchrun += [f"--rdzv-conf=is_host={int(number == 1)}"]  # the name of the machine has other addresses
            keep = {name: text for name, text in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER_"))}
            env = {"GLOO_SOCKET_IFNAME": self.ends[host], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            env |= {"PYTHONWARNINGS": "ignore", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            command = ["ip", "netns", "exec", self.spaces[host], sys.executable, *torchrun, script, *map(str, args)]
            with self.file(host).open("w") as out:
                job = subprocess.Popen(command, env=keep | env, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
            self.jobs.append(job)

    def file(self, host):
        return self.folder / f"{host}.log"

    def outputs(self):
        """Return what the jobs have printed."""
        return [self.file(host).read_text() for host in HOSTS]

    def end(self):
        """End what still runs on the hosts, and remove them with the cable."""
        for host in HOSTS:
            for pid in ip("netns", "pids", self.spaces[host], check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", self.spaces[host], check=False)
        for job in self.jobs:
            job.kill()
            job.wait()


def missing():
    """Return why there can be no second host here, or nothing."""
    if sys.platform != "linux" or not all(map(shutil.which, ("ip", "tc"))):
        return "needs iproute2 of Linux"
    probe = f"fq{os.getpid()}probe"
    made = ip("netns", "add", probe, check=False)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    entered = ip("netns", "exec", probe, "true", check=False)
    ip("netns", "del", probe, check=False)
    return f"network namespaces cannot be entered: {entered.stderr.strip()}" if entered.returncode else ""


@pytest.fixture
def cable(tmp_path):
    if why := missing():
        pytest.skip(why)
    made = Cable(tmp_path)
    try:
        made.lay()
        yield made
    finally:
        made.end()


STEP = """
    import sys, time, torch, shard
    import torch.distributed as dist
    from torch.func import grad_and_value
    from fquant import NF4_DQ, jit, lora, quantize, tree
    from models import decoder, hf

    def step(world):
        torch.set_num_threads(1)
        cfg, params = hf.load("examples/model", torch.float32)
        base = tree.map_at(r"layers\\.\\d+\\.(q|k|v|o|gate|up|down)", lambda w: quantize(w, NF4_DQ), params)
        adapters = lora.init(base, r"layers\\.\\d+\\.(q|v)", rank=8, alpha=16, key=0)
        tokens = torch.arange(4 * 17).reshape(4, 17) % 100
        mesh, rules = shard.mesh(fsdp=world), shard.Rules()
        base, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh)
        comm, mine = shard.comm(mesh, rules), shard.share(tokens, mesh, rules)

        def loss(adapters, base, tokens):
            params = lora.attach(base, adapters)
            return decoder.loss(params, tokens[:, :-1], tokens[:, 1:], cfg, comm, count=64)

        @jit
        def step(adapters, base, tokens):
            return shard.reduce(grad_and_value(loss)(adapters, base, tokens), mesh, rules)

        take = lambda: step(adapters, shard.local(base), mine)
        return mesh, take
"""

ONCE = """
    mesh, take = step(int(sys.argv[2]))
    grads, value = take()
    start = time.monotonic()
    total = shard.psum(torch.ones(int(sys.argv[3])), mesh, "fsdp")
    assert (total == dist.get_world_size()).all()
    if dist.get_rank() == 0:
        torch.save([t.clone() for t in tree.leaves(grads)] + [value.clone()], sys.argv[1])
        print("the sum took", time.monotonic() - start, flush=True)
    shard.close()
"""

FOREVER = """
    mesh, take = step(2)
    x = torch.ones(int(sys.argv[2]))
    while True:
        take() if sys.argv[3] == "replay" else shard.psum(x, mesh, "fsdp")
        open(f"{sys.argv[1]}/ready{dist.get_rank()}", "w").close()
"""


def write(folder, *parts):
    script = folder / "job.py"
    script.write_text("".join(map(textwrap.dedent, parts)))
    return script


def wait_until(done, cable):
    """Wait until ``done()``, and fail with what the job printed if that takes too long."""
    deadline = time.monotonic() + START
    while not done():
        assert time.monotonic() < deadline, "\n".join(cable.outputs())
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [False, True])
def test_a_step_is_that_of_one_process(cable, tmp_path, slow):
    """A quantised base is placed over the cable, and a captured step has the gradients of one process.

    A slow cable is waited for, in a message that takes longer than a silent rank would be.
    """
    script = write(tmp_path, STEP, ONCE)
    alone = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "one.pt"), "1", "8"], cwd=ROOT, timeout=START, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    if slow:
        cable.slow()
    cable.start(script, tmp_path / "two.pt", 2, 6 << 20 if slow else 8)  # 24 MiB, 12 s
    wait_until(lambda: all(job.poll() is not None for job in cable.jobs), cable)
    assert [job.returncode for job in cable.jobs] == [0, 0], "\n".join(cable.outputs())
    took = re.findall(r"the sum took (.+)", "".join(cable.outputs()))
    assert len(took) == 1 and (not slow or float(took[0]) > desync.SILENCE)
    one, two = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("one", "two"))
    assert len(one) == len(two) > 2
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "call"), [(8, "psum"), (1 << 24, "psum"), (8, "replay")])
def test_a_cut_cable_is_named_on_both_sides(cable, tmp_path, size, call):
    """Between calls, in the middle of a message, and in replays of a captured step."""
    cable.start(write(tmp_path, STEP, FOREVER), tmp_path, size, call)
    wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), cable)
    time.sleep(0.5)
    cable.cut()
    cut = time.time()
    wait_until(lambda: all("has not answered" in text for text in cable.outputs()), cable)
    took = time.time() - cut
    what = {
        "psum": rf"all_reduce sum float32\[{size}\] over all ranks",
        "replay": r"replay of jit\(step\) over all ranks",
    }[call]
    named = set()
    for text in cable.outputs():
        line = re.search(r"RuntimeError: rank (\d) has not answered for 6 s, so it is stopped or cut off; it .*", text)
        assert line, text
        named.add(line[1])
        own = 1 - int(line[1])
        assert re.search(rf"; rank {own} (is|waits for it) in {what} \(job.py:\d+\)", line[0]), line[0]
    assert named == {"0", "1"}  # each rank by the other
    assert took < LIMIT
