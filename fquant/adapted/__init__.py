"""Weights with an adapter attached: the nodes (``nodes``), merge-aware products (``merge_aware``), slots (``slots``).

``packed_linear.linear`` multiplies with all of them; ``fquant.lora`` makes, attaches and merges adapters.
"""
