"""Ranks with different arguments, or with one that fails alone, all raise at once and name the difference."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import FP4, NF4, NF4_DQ, lora, quantize, random, tree
from fquant.compile import all_gather_text
from fquant.lazy import Lazy
from models import decoder, hf
from models.config import Config
from shard import agree
from tests.helpers import ranks
from tests.helpers.cases import slow_after

pytestmark = pytest.mark.xdist_group("ranks")

CFG = Config(
    vocab=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=128, norm_eps=1e-5,
    rope_theta=10000.0, rope_scaling=None, max_positions=64, tied=True, attention_bias=False, mlp_bias=False,
)  # fmt: skip


def all_raise(n, fn, *args):
    """Return the errors of all ranks, which are ValueErrors and arrive within 10 seconds."""
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(n, fn, *args, timeout=10)
    failures = caught.value.failures
    assert sorted(failures) == list(range(n))
    assert {f.type for f in failures.values()} == {"ValueError"}, failures
    return [failures[rank].message for rank in range(n)]


def exchanged(texts):
    return all_gather_text(texts[dist.get_rank()])


@pytest.mark.parametrize(
    "texts",
    slow_after(2, [["a", "bb", ""], ["", "", ""], [" x\n", "y\t", "ü\u2028z"], ["long" * 5000, "1", "2"]]),
    ids=["short", "empty", "white space", "long"],
)
def test_exchange(texts):
    assert ranks.run(3, exchanged, texts) == [texts] * 3


def test_exchange_escapes_what_utf8_cannot_hold():
    assert ranks.run(2, exchanged, ["a\udcffb", "c"]) == [["a\\udcffb", "c"]] * 2


def compared(tables):
    agree.same("here", tables[dist.get_rank()])


@pytest.mark.parametrize(
    "tables",
    [
        [{"a": "1", "b": "2"}] * 3,
        [{}] * 3,
        [{"a": "1"}, {"a": ""}, {"a": "1"}],  # unknown agrees with anything
        [{"a": ""}, {"a": ""}, {"a": "7"}],
    ],
)
def test_same(tables):
    ranks.run(3, compared, tables, timeout=10)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"a": "1"}, {"a": "2"}, {"a": "1"}], "a: ranks 0, 2 have 1; rank 1 has 2"),
        ([{"a": "1"}, {"a": ""}, {"a": "3"}], "a: rank 0 has 1; rank 2 has 3"),
        ([{"a": "1", "b": "x"}, {"a": "1"}, {"a": "1", "b": "x"}], "b: ranks 0, 2 have x; rank 1 has nothing"),
        ([{"a": "1"}, {"a": "1"}, {"a": "1", "b": "x"}], "b: ranks 0, 1 have nothing; rank 2 has x"),
        # Line breaks and tabs are part of a fact, and so is what follows them.
        ([{"a": "1\n2\t3"}, {"a": "1\n2\t4"}, {"a": "1\n2\t3"}], "a: ranks 0, 2 have 1\n2\t3; rank 1 has 1\n2\t4"),
    ],
)
def test_what_differs_is_named_with_the_ranks_that_have_it(tables, message):
    wanted = f"here: ranks disagree on {message}; start every rank with the same"
    assert all_raise(3, compared, tables) == [wanted] * 3


def attempted(bad):
    def f():
        if dist.get_rank() in bad:
            raise ValueError(f"model.safetensors: missing\ud8ff ({dist.get_rank()})")
        return dist.get_rank()

    return agree.attempt("open", f)


def test_attempt_tells_the_others_who_failed_and_how():
    assert ranks.run(3, attempted, []) == [0, 1, 2]
    errors = all_raise(3, attempted, [1])
    assert errors[1] == "model.safetensors: missing\ud8ff (1)"
    assert errors[0] == errors[2] == "open failed on rank 1: ValueError: model.safetensors: missing\\ud8ff (1)"
    assert all_raise(3, attempted, [0, 2])[1].count("; rank 2: ValueError: model") == 1


# --- the comparison of place


def base_and_adapters(cfg=CFG, format=NF4, seed=0):
    params = decoder.init(cfg, random.key(seed), torch.float32)
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", partial(quantize, format=format), params)
    return base, lora.init(base, r"layers\.\d+\.(q|v)", rank=2, key=0)


def touch(base, path, change):
    return tree.map_at(path.replace(".", r"\."), change, base)


def meta(x):
    return tree.map(lambda t: t.to("meta"), x)


def lazily(x, stamp="stamp"):
    is_weight = lambda y: not isinstance(y, list) and not hasattr(y, "layers") and not hasattr(y, "norm")
    is_leaf = lambda y: is_weight(y) and not hasattr(y, "q")
    return tree.map(lambda y: Lazy(lambda: y, meta(y), lambda: stamp), x, is_leaf=is_leaf)


def unreadable(*_):
    raise FileNotFoundError(2, "No such file or directory", "gone.safetensors")


def first(mapping):
    return dict(list(mapping.items())[:1])


# name -> (the arguments of the odd rank, from (base, adapters, cfg, rules, dims)), the fact that is named
ODD = {
    "config": (lambda b, a, c, r, d: (b, a, replace(c, norm_eps=1e-6), r, d), "config.norm_eps: "),
    "no config": (lambda b, a, c, r, d: (b, a, None, r, d), "config: "),
    "rules": (lambda b, a, c, r, d: (b, a, c, shard.Rules(block=None), d), "rules: "),
    "rules that do not exist": (lambda b, a, c, r, d: (b, a, c, shard.Rules(block="tp"), d), "rules: "),
    "names of dims": (lambda b, a, c, r, d: (b, a, c, r, d | {"embed": {"": "embed vocab"}}), "dims of embed: "),
    "blocks": (lambda b, a, c, r, d: (b, a, c, r, first(d)), "dims of layers.0: "),
    "a layer less": (lambda b, a, c, r, d: (replace(b, layers=b.layers[:1]), a, c, r, d), "layers.1: "),
    "an untied head": (
        lambda b, a, c, r, d: (replace(b, final=replace(b.final, head=b.embed)), a, c, r, d),
        "final.head: ",
    ),
    "a list": (lambda b, a, c, r, d: (replace(b, layers=tuple(b.layers)), a, c, r, d), "layers: "),
    "format": (lambda b, a, c, r, d: (base_and_adapters(format=FP4)[0], a, c, r, d), "layers.0.q: "),
    "format, not yet read": (
        lambda b, a, c, r, d: (meta(base_and_adapters(format=FP4)[0]), a, c, r, d),
        "layers.0.q: ",
    ),
    "nested format": (lambda b, a, c, r, d: (base_and_adapters(format=NF4_DQ)[0], a, c, r, d), "layers.0.q: "),
    "block size": (
        lambda b, a, c, r, d: (base_and_adapters(format=replace(NF4, block=32))[0], a, c, r, d),
        "layers.0.q: ",
    ),
    "dense": (
        lambda b, a, c, r, d: (touch(b, "layers.1.down", lambda w: torch.zeros(64, 128)), a, c, r, d),
        "layers.1.down: ",
    ),
    "shape": (
        lambda b, a, c, r, d: (touch(b, "layers.1.mlp_norm", lambda w: w[:32]), a, c, r, d),
        "layers.1.mlp_norm: ",
    ),
    "dtype": (lambda b, a, c, r, d: (touch(b, "embed", lambda w: w.half()), a, c, r, d), "embed: "),
    "one element": (
        lambda b, a, c, r, d: (touch(b, "layers.1.up.codes", lambda t: t ^ 1), a, c, r, d),
        "layers.1.up.codes (content): ",
    ),
    "the sign of a zero": (
        lambda b, a, c, r, d: (touch(b, "final.norm", lambda t: -t), a, c, r, d),
        "final.norm (content): ",
    ),
    "values of adapters": (
        lambda b, a, c, r, d: (b, lora.init(b, r"layers\.\d+\.(q|v)", rank=2, key=1), c, r, d),
        "layers.0.q.a (content) of tree 2: ",
    ),
    "rank of adapters": (
        lambda b, a, c, r, d: (b, lora.init(b, r"layers\.\d+\.(q|v)", rank=4, key=0), c, r, d),
        "layers.0.q.a of tree 2: ",
    ),
    "alpha of adapters": (
        lambda b, a, c, r, d: (b, lora.init(b, r"layers\.\d+\.(q|v)", rank=2, key=0, alpha=32.0), c, r, d),
        "layers.0.q of tree 2: ",
    ),
    "targets of adapters": (
        lambda b, a, c, r, d: (b, lora.init(b, r"layers\.\d+\.q", rank=2, key=0), c, r, d),
        "layers.0.v of tree 2: ",
    ),
    "tensors for files": (lambda b, a, c, r, d: (lazily(b), a, c, r, d), "embed: "),
}


def place_odd(name, n):
    base, adapters = base_and_adapters()
    if name == "the sign of a zero":
        base = touch(base, "final.norm", torch.zeros_like)
    given = (base, adapters, CFG, shard.Rules(), decoder.dims(CFG))
    mesh = shard.mesh(fsdp=n)
    if dist.get_rank() == 1:
        given = ODD[name][0](*given)
    base, adapters, cfg, rules, dims = given
    shard.place((base, adapters), dims, rules, mesh, cfg)


@pytest.mark.parametrize("name", ODD)
def test_ranks_given_different_things_raise(name):
    for message in all_raise(3, place_odd, name, 3):
        assert message.startswith(f"place: ranks disagree on {ODD[name][1]}ranks 0, 2 have "), message
        assert "; rank 1 has " in message


def one_tree_or_two():
    base, adapters = base_and_adapters()
    mesh = shard.mesh(fsdp=2)
    shard.place((base, adapters) if dist.get_rank() else base, decoder.dims(CFG), shard.Rules(), mesh, CFG)


def test_adapters_on_some_ranks_only():
    assert "(root) of tree 2: rank 0 has nothing; rank 1 has dict" in all_raise(2, one_tree_or_two)[0]


def replicated_odd():
    shard.replicate({"m": torch.zeros(2 + dist.get_rank())}, shard.mesh(fsdp=dist.get_world_size()))


def test_replicate_compares_outlines():
    for message in all_raise(2, replicated_odd):
        assert message.startswith("replicate: ranks disagree on m: rank 0 has float32[2]; rank 1 has float32[3]; ")


# --- checkpoints


def place_lazy(stamps, broken, how):
    base, _ = base_and_adapters()
    rank = dist.get_rank()
    base = lazily(base, stamps[rank])
    if rank in broken:
        down = base.layers[1].down
        bad = {"read": replace(down, read=unreadable), "stamp": replace(down, stamp=unreadable)}[how]
        base = replace(base, layers=[base.layers[0], replace(base.layers[1], down=bad)])
    shard.place(base, decoder.dims(CFG), shard.Rules(), shard.mesh(fsdp=dist.get_world_size()), CFG)


def test_stamps_of_files_are_compared():
    ranks.run(2, place_lazy, ["s", "s"], [], "read", timeout=10)
    for message in all_raise(3, place_lazy, ["s", "s", "t"], [], "read"):
        assert message == (
            "place: ranks disagree on embed (content): ranks 0, 1 have s; rank 2 has t; start every rank with the same"
        )


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_that_cannot_read_tells_the_others(n):
    """A file is broken on all ranks, and any of them may get to read it."""
    messages = all_raise(n, place_lazy, ["s"] * n, range(n), "read")
    own = [rank for rank, message in enumerate(messages) if message.startswith("layers.1.down: cannot be read: [Err")]
    assert len(own) == 1
    for rank, message in enumerate(messages):
        assert rank in own or message.startswith(f"place failed on rank {own[0]}: ValueError: layers.1.down: cannot be")
        assert "gone.safetensors" in message


def test_a_rank_that_cannot_stamp_tells_the_others():
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(3, place_lazy, ["s"] * 3, [1], "stamp", timeout=10)
    errors = caught.value.failures
    assert (errors[1].type, sorted(errors)) == ("FileNotFoundError", [0, 1, 2])
    assert all(errors[rank].message.startswith("place failed on rank 1: FileNotFoundError: ") for rank in (0, 2))


def folder_of(tmp_path, rank, change=None):
    params = decoder.init(CFG, random.key(0), torch.bfloat16)
    folder = tmp_path / f"rank{rank}"
    hf.save(folder, CFG, change(params) if change else params)
    return str(folder)


def place_folder(folders, damage):
    rank, mesh = dist.get_rank(), shard.mesh(fsdp=2)
    cfg, params = agree.attempt("open", partial(hf.lazy, folders[rank]))
    if damage == "gone" and rank == 1:
        shutil.rmtree(folders[1])
    if damage == "cut" and rank == 1:
        with open(f"{folders[1]}/model.safetensors", "r+b") as file:
            file.truncate(4000)
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", partial(quantize, format=NF4), params)
    placed = shard.place(base, decoder.dims(cfg), shard.Rules(), mesh, cfg)
    return tree.nbytes(shard.collect(placed))


def test_equal_folders_are_placed(tmp_path):
    folders = [folder_of(tmp_path, 0), folder_of(tmp_path, 1)]
    assert ranks.run(2, place_folder, folders, "", timeout=10) == [tree.nbytes(base_and_adapters_bf16())] * 2


def base_and_adapters_bf16():
    params = decoder.init(CFG, random.key(0), torch.bfloat16)
    return tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", partial(quantize, format=NF4), params)


def test_folders_that_differ_in_one_tensor_are_refused(tmp_path):
    change = partial(touch, path="layers.1.o", change=lambda w: w.flip(0))
    for message in all_raise(2, place_folder, [folder_of(tmp_path, 0), folder_of(tmp_path, 1, change)], ""):
        assert message.startswith("place: ranks disagree on layers.1.o (content): rank 0 has ")


def test_folders_of_different_configs_are_refused(tmp_path):
    other = replace(CFG, rope_theta=500000.0)
    params = decoder.init(other, random.key(0), torch.bfloat16)
    hf.save(tmp_path / "other", other, params)
    for message in all_raise(2, place_folder, [folder_of(tmp_path, 0), str(tmp_path / "other")], ""):
        assert "disagree on config.rope_theta: rank 0 has 10000.0; rank 1 has 500000.0" in message


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_that_one_rank_lacks(tmp_path, file):
    folders = [folder_of(tmp_path, 0), folder_of(tmp_path, 1)]
    (tmp_path / "rank1" / file).unlink()
    errors = all_raise(2, place_folder, folders, "")
    assert file in errors[1]
    assert errors[0].startswith("open failed on rank 1: ValueError: ") and file in errors[0]


def test_a_file_cut_short_on_one_rank(tmp_path):
    folders = [folder_of(tmp_path, 0), folder_of(tmp_path, 1)]
    with open(tmp_path / "rank1" / "model.safetensors", "r+b") as file:
        file.truncate(4000)
    errors = all_raise(2, place_folder, folders, "")
    assert errors[0].startswith("open failed on rank 1: ValueError: ") and "model.safetensors" in errors[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [("gone", "place failed on rank 1: FileNotFoundError: "), ("cut", "place: ranks disagree on embed (content): ")],
)
def test_a_file_damaged_on_one_rank_after_it_was_opened(tmp_path, damage, message):
    folders = [folder_of(tmp_path, 0), folder_of(tmp_path, 1)]
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, place_folder, folders, damage, timeout=10)
    errors = caught.value.failures
    assert sorted(errors) == [0, 1] and errors[0].type == "ValueError"
    assert errors[0].message.startswith(message)
