"""Files that hold the former names of classes, fields and formats load as today's."""

import json
import re

import torch

from fquant import AQ_2X8, quantize, random, tree, vq
from fquant.io import safetensors, tree_json

FORMER = {"fquant.ShardedBook": "fquant.BookPart", "fquant.ShardedStats": "fquant.PartStats", '"aq_2x8"': '"vq2"'}


def test_a_file_of_former_names_loads(tmp_path):
    """The metadata of this file holds the former names of renamed classes and formats."""
    book = vq.sharded.init(random.key(0), 64, 4, 16, 32)
    part = vq.sharded.apply(book, torch.randn(8, 4), random.key(1))[-1]
    fsq = vq.fsq.init(random.key(2), (5, 3), dim=6)  # with projections
    written = {"w": quantize(torch.randn(8, 64), AQ_2X8), "book": book, "stats": part, "fsq": fsq}
    text, tensors = tree_json.encode(written)
    for name, former in FORMER.items():
        assert name in text
        text = text.replace(name, former)
    content = json.loads(text)
    parts = content["tree"]["dict"]
    for spec, path in ((parts["stats"], "stats"), (parts["fsq"]["fields"]["params"], "fsq.params")):
        for (_, former), name in tree.FORMER_FIELDS.items():
            if name in spec["fields"]:
                spec["fields"][former] = spec["fields"].pop(name)
                tensors = {re.sub(rf"^{path}\.{name}\b", f"{path}.{former}", at): t for at, t in tensors.items()}
    assert {"stats.own.counts", "fsq.params.enter.weight"} <= set(tensors)
    text = json.dumps(content)
    safetensors.write(tmp_path / "x", tensors, {"format": "pt", safetensors.TREE: text})
    got = safetensors.load(tmp_path / "x")
    assert tree.structure(got) == tree.structure(written)
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(written)))
    assert got["w"].format == AQ_2X8
