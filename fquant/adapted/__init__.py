"""Weights with an adapter attached: the nodes, and what computes with them.

Modules: ``nodes``, ``dora`` (row norms), ``merge_aware`` (products of the merged weight), ``slots``.

``packed_linear.linear`` multiplies with all of them; ``fquant.lora`` makes, attaches and merges adapters.
"""
