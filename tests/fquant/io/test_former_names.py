"""Files that hold the former names of classes, fields and formats load as today's."""

import json
import re
from dataclasses import replace

import pytest
import torch

from fquant import AQ_2X8, FP8, INT4_ZERO, NF4, NF4_DQ, Packed, quantize, random, tree, vq
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


# --- fields that older files lack -------------------------------------------------------------------------------------

W = torch.arange(512.0).view(4, 128)
OF_EARLIER_RELEASES = (
    '{"version":1,"tree":{"node":"fquant.Packed","fields":{"codes":"tensor","scale":"tensor","offset":null,'
    '"vectors":null},"static":{"format":{"value":"fquant.Format","fields":{"name":"nf4","bits":4,"block":64,"table":'
    '{"tuple":[TABLE]},"scale":null,"flat":false,"center":false,"vectors":null}},"shape":{"tuple":[4,128]},'
    '"dtype":{"dtype":"float32"}}}}'
).replace("TABLE", ",".join(map(repr, NF4.table or ())))


def test_the_text_of_formats_without_zero_points_is_that_of_earlier_releases():
    text, tensors = tree_json.encode(quantize(W, NF4))
    assert text == OF_EARLIER_RELEASES and list(tensors) == ["codes", "scale"]


def test_a_file_of_an_earlier_release_loads():
    wanted = quantize(W, NF4)
    tensors = {"codes": wanted.codes, "scale": wanted.scale}
    got = tree_json.decode(OF_EARLIER_RELEASES, tensors.__getitem__)
    assert isinstance(got, Packed) and got.format == NF4 and tree.structure(got) == tree.structure(wanted)
    with pytest.raises(ValueError, match="Packed: missing vectors, unknown none; wanted codes, offset, scale"):
        tree_json.decode(OF_EARLIER_RELEASES.replace(',"vectors":null},"static"', '},"static"'), tensors.__getitem__)
    with pytest.raises(ValueError, match="Format: missing none, unknown zeros; wanted bits"):
        zeros = OF_EARLIER_RELEASES.replace('"vectors":null}}', '"vectors":null,"zeros":false}}')
        tree_json.decode(zeros, tensors.__getitem__)


@pytest.mark.parametrize("format", [INT4_ZERO, replace(INT4_ZERO, block=None, scale=NF4_DQ.scale), FP8], ids=repr)
def test_new_fields_come_back(format, tmp_path):
    wanted = {"w": quantize(W, format), "of older files": quantize(W, NF4_DQ)}
    safetensors.save(tmp_path / "x", wanted)
    got = safetensors.load(tmp_path / "x")
    assert tree.structure(got) == tree.structure(wanted)
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(wanted)))
