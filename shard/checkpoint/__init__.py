"""Checkpoints of a sharded tree: each rank writes what it has, and any mesh reads it.

    shard.checkpoint.save("run/step-40", state, mesh, rules)             # every rank; on disk when it returns
    state = shard.checkpoint.load("run/step-40", state, mesh, rules)     # on any mesh; the form and devices of `state`

    writing = shard.checkpoint.begin("run/step-41", state, mesh, rules)  # copied to the host, written by a thread
    ...                                                                  # steps, which may overwrite `state`
    writing = shard.checkpoint.begin("run/step-42", state, mesh, rules, after=writing)
    ...
    shard.checkpoint.finish(writing)

A checkpoint is a folder:

    rank-2-of-4.safetensors    the ranges (local_ranges.py) that a rank writes, flat
    manifest.json              the tree, its tensors, and each file's size and digest; a digest of all that

Ranks that have the same tensors share the work: each is written once. The folder has a temporary name until its files
and then the manifest are on disk. A folder with its final name is therefore whole, and a killed run leaves none that is
not, only temporary ones, which ``clean`` removes. Nothing is pickled. The files are those of torch's
HuggingFaceStorageReader, so ``torch.distributed.checkpoint.load`` reads the flat tensors.

``load`` believes nothing: files have the size and the header of the manifest, data have the digests of the header, and
ranges cover each tensor once. Every fault is a ValueError on every rank, with the name of the file.

The folder must be on a file system that all ranks see, which the first checkpoint in a folder checks. Ranks exchange a
text before they write and in ``finish``, and nothing in between: rank 0 sees in the folder that all have written. The
text has a digest of the tree, and the outcome of the checkpoint that was ``after``. If that had a tree of the same
shapes, nothing but values is looked at. One rank with 338 tensors of 27 MiB begins in 7 ms. Its thread takes 23 ms of a
core, of which digests are 11.

``read`` needs no mesh: it returns the whole tree, for programs that show or convert it.
"""

from .manifest import MANIFEST, clean, keep, remove, steps
from .reading import load, read
from .writing import Writing, begin, finish, save

__all__ = ["MANIFEST", "Writing", "begin", "clean", "finish", "keep", "load", "read", "remove", "save", "steps"]
