"""Weights with an adapter attached: the nodes (``nodes``), and merge-aware products (``merge_aware``).

``packed_linear.linear`` multiplies with all of them; ``fquant.lora`` makes, attaches and merges adapters.
"""
