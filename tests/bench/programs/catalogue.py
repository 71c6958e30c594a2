"""The programs of this benchmark: what makes each, and its sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from . import dynamics, learning, networks, sequences

CHILD = "tests.bench.programs.child"  # the module that measures one program in a process of its own
Make = Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]


class Program(NamedTuple):
    """A program: ``make(size)`` returns it with its arguments; sizes for its memory, and its time (None: no row)."""

    make: Make
    memory: int
    time: int | None = None


PROGRAMS = {
    each.make.__name__: each
    for each in (
        Program(learning.maml, 4000, 20),
        Program(learning.private_gradients, 1500, 128),
        Program(learning.sparse_autoencoder, 16000, 256),
        Program(learning.ensemble, 20000),
        Program(learning.contrastive, 2000, 256),
        Program(sequences.lstm, 3000, 32),
        Program(sequences.hidden_markov, 8000, 64),
        Program(sequences.selective_scan, 300, 16),
        Program(sequences.alibi_attention, 120),
        Program(sequences.policy_gradient, 1000),
        Program(dynamics.runge_kutta, 6000, 512),
        Program(dynamics.sinkhorn, 2000, 256),
        Program(dynamics.newton, 80000, 1024),
        Program(dynamics.equilibrium, 80000),
        Program(dynamics.burgers, 40000, 1024),
        Program(dynamics.gaussian_process, 2000),
        Program(networks.low_rank_layers, 2048),
        Program(networks.top_k_routing, 22000, 256),
        Program(networks.pointwise_chain, 20000, 1024),
        Program(networks.graph_attention, 20000),
        Program(networks.variational_autoencoder, 25000),
        Program(networks.denoising, 200),
    )
}
