"""The seconds of nodes with elementwise chains fused are those of the fused graph, at the nodes before fusion."""

import pytest

from fquant.compile import roofline
from fquant.compile.trace import trace
from tests.helpers.graphs.bf16_step import start, step
from tests.helpers.sharding.schedules import slow_device

DEVICE = slow_device(1e9)


def test_chains_take_the_seconds_of_one_node():
    """The sum is that of the step as it will run, but for what donation and passes behind change."""
    args = start()
    plain, fused = (trace(lambda args: step(*args), args, fuse=fuse, recompute=False) for fuse in (False, True))
    alone = lambda captured: sum(roofline.seconds(node, DEVICE) for node in captured.module.graph.nodes)
    found = roofline.seconds_if_fused(plain.module.graph, DEVICE)
    assert len(found) == len(plain.module.graph.nodes)
    assert sum(found) == pytest.approx(alone(fused), rel=0.02) and sum(found) < 0.95 * alone(plain)
    products = [i for i, node in enumerate(plain.module.graph.nodes) if "matmul" in str(node.target)]
    nodes = list(plain.module.graph.nodes)
    assert products and all(found[i] >= roofline.seconds(nodes[i], DEVICE) for i in products)
