"""Sums over the rows of a batch in one order, which does not depend on the mesh: the same bits on any number of ranks.

    grads, value = shard.ordered.grad_and_value(loss, mesh, rules, 8)(params, [rows])  # of the 8 rows of all ranks
    value = shard.ordered.sum_rows(losses, 8, mesh, rules)                             # of a value for each row

A gradient of many rows is a sum, and a sum of floats depends on its order. A product over all rows of a rank, and then
an all-reduce, take an order that follows the number of ranks. Here each row's gradient is a *leaf*, and leaves are
added along a binary tree over the rows of the whole batch (sum_tree.py). Ranks have consecutive rows. A rank adds up
the subtrees that it has whole (by_row.py), and ranks exchange these and finish the tree (exchange.py).

The bits of a leaf must not depend on its neighbours either. ``vmap`` of a loss of one row makes products of all rows of
a chunk, and batched products that make the gradients of each. On the host all of these are sums in a fixed order
(``fquant.batch_invariant``).
"""

from .by_row import grad_and_value
from .exchange import sum_rows
from .sum_tree import Rows

__all__ = ["Rows", "grad_and_value", "sum_rows"]
