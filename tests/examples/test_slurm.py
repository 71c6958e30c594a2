"""The script for Slurm starts an agent of torchrun on each host; srun and scontrol are stand-ins that print."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"


def test_the_command_of_the_agents(tmp_path):
    for name, text in {"scontrol": 'printf "n7\\nn8\\n"', "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[7-8]", "RANKS": "4"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", SCRIPT, "examples.qlora", "--out", "a folder"],
        env=os.environ | job | {"PATH": path}, capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    words = ran.stdout.splitlines()
    assert words[-4:] == ["-m", "examples.qlora", "--out", "a folder"]
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-id=42", "--rdzv-endpoint=n7:29400"} < set(words)
    assert "--ntasks-per-node=1" in words and "torch.distributed.run" in words
