"""The QLoRA step of a few layers in the shapes of Llama-3-8B, traced for CUDA."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

import shard
from examples.common.pricing import Job, arguments
from examples.common.training_step import train_step
from fquant import NF4_DQ
from fquant.compile.passes.donate import written_over
from fquant.compile.trace import apply, trace
from models.presets import PRESETS


@contextmanager
def captured(num_layers, checkpoint="selective", batch=4, seq=2048, cfg=PRESETS["llama3-8b"], fsdp=1, **far):
    """Open a mesh of ``fsdp`` ranks, and give the step of ``num_layers`` layers, captured for CUDA.

    ``far`` are the options of a Job that offload.
    """
    targets = ("q", "k", "v", "o", "gate", "up", "down")
    job = Job(replace(cfg, num_layers=num_layers), NF4_DQ, targets, 16, batch, seq, checkpoint=checkpoint, **far)
    with shard.abstract_mesh("cuda", fsdp=fsdp) as mesh:
        args = arguments(job, mesh)
        options = args["setup"].capture()
        donated = written_over(args, options.pop("donate"))
        yield trace(
            partial(apply, train_step),
            args,
            donated,
            **options,
            device=torch.device("cuda"),
            host=shard.on_host(args["base"]),
        )
