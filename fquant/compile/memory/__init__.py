"""The memory of a replay: ``plan`` assigns offsets; ``allocator`` holds the pages and replays into them.

``out_variants`` and ``composed`` say which ops can compute into memory that they are given. ``pool`` serves the tensors
that all other ops allocate.
"""
