"""The QLoRA step of a few layers in the shapes of Llama-3-8B, traced for CUDA."""

from contextlib import contextmanager
from dataclasses import replace

from examples.common.pricing import Job, captured_step
from fquant import NF4_DQ
from fquant.compile.roofline import DEVICES
from models.presets import PRESETS


@contextmanager
def captured(num_layers, checkpoint="selective", batch=4, seq=2048, cfg=PRESETS["llama3-8b"], fsdp=1, **far):
    """Open a mesh of ``fsdp`` ranks, and give the step of ``num_layers`` layers, captured for CUDA.

    ``far`` are the options of a Job that offload.
    """
    targets = ("q", "k", "v", "o", "gate", "up", "down")
    job = Job(replace(cfg, num_layers=num_layers), NF4_DQ, targets, 16, batch, seq, checkpoint=checkpoint, **far)
    with captured_step(job, {"fsdp": fsdp}, DEVICES["h100"]) as found:
        yield found
