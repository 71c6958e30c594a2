"""States of quantisers that are composed of books, for ``test_family``."""

from fquant import tree
from fquant.vq.codebook import simvq
from fquant.vq.composite import grouped, hierarchical, residual
from tests.helpers.vq.peers import drawn

DIM = 6


def spread(state):
    """Spread codes like rows, so that a sum in another order selects the same code."""
    return tree.map_at(r"(.*\.)?(codes|frozen)", lambda codes: drawn(*codes.shape, seed=codes.numel()), state)


def books(**options):
    return spread(residual.init_books(0, 7, 4, 3, dim=DIM, **options))


STATES = {
    "residual": (residual, lambda: books()),
    "shared": (residual, lambda: books(shared=True)),
    "dropout": (residual, lambda: books(dropout=True)),
    "learnable": (residual, lambda: books(learnable=True)),
    "implicit": (residual, lambda: spread(residual.init_implicit(0, 7, 4, 3, dim=DIM, depth=1))),
    "simvq": (simvq, lambda: spread(simvq.init(0, 7, DIM, hidden=(5,)))),
    "residual simvq": (residual, lambda: spread(residual.init_simvq(0, 7, 4, 3, dim=DIM, dropout=True))),
    "grouped": (
        grouped, lambda: spread(grouped.init(0, 2 * [lambda key: residual.init_books(key, 7, 3, 2, dropout=True)]))
    ),
    "hierarchical": (hierarchical, lambda: spread(hierarchical.init(0, 7, DIM, (1, 3, 5)))),
    "hierarchical, dropout": (
        hierarchical, lambda: spread(hierarchical.init(0, 7, DIM, (1, 3, 5), shared=False, dropout=0.7))
    ),
}  # fmt: skip
LEARN = [name for name in STATES if "simvq" not in name]
