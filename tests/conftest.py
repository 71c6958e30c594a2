"""One thread a process (two xdist workers on two cores), no network, deterministic hypothesis."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("fquant", deadline=None, derandomize=True, database=None, max_examples=25)
hypothesis.settings.load_profile("fquant")
