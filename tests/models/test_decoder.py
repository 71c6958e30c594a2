"""The decoder: packed against separate documents, every transform against float64 loops, tables, refusals."""

import dataclasses
from itertools import product

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import NF4, quantize, random, tree
from fquant.activation_checkpoint import remat
from fquant.communication import LOCAL, Comm, Loadable
from models import blocks, decoder
from models.config import Config, RopeScaling
from models.rope import rope
from tests.helpers.cases import slow_after

CFG = Config(vocab=17, dim=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, hidden=20, max_positions=16)
VARIANTS = {
    "untied": CFG,
    "tied": dataclasses.replace(CFG, tied=True),
    "biases, scaling": dataclasses.replace(
        CFG, attention_bias=True, mlp_bias=True, rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 8)
    ),
    "qk norm": dataclasses.replace(CFG, qk_norm=True, family="qwen3"),
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6]])
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2, 2, 3, 3, 3, 3, 0], [0, 0, 0, 0, 0, 0, 0]])
TWICE = ("local", "remat twice")  # that can be differentiated twice
COMMS = {"local": LOCAL, "remat": Comm(wrap=remat), "remat twice": Comm(wrap=lambda f: remat(f, order=2))}


def params_of(cfg, dtype=torch.float64):
    """Draw every parameter at random, so that no bias or norm is at a special value."""
    key = random.key(1)
    return tree.map_with_path(
        lambda path, like: (
            0.5 * random.normal(random.fold(key, path), tuple(like.shape), dtype=dtype) + path.endswith("norm")
        ),
        decoder.shapes(cfg),
    )


def loss(params, tokens, segments, cfg, comm=LOCAL):
    return blocks.cross_entropy(decoder.forward(params, tokens, cfg, comm, segments), tokens.roll(-1, -1))


def difference(f, params, way, step=1e-4):
    """Return the derivative of ``f`` along ``way`` by the five-point rule, of fourth order in ``step``."""
    at = {i: f(tree.map(lambda p, w, i=i: p + i * step * w, params, way)) for i in (-2, -1, 1, 2)}
    return tree.map(lambda a, b, c, d: (a - 8 * b + 8 * c - d) / (12 * step), at[-2], at[-1], at[1], at[2])


def close(a, b, **options):
    torch.testing.assert_close(tree.leaves(a), tree.leaves(b), **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_are_separate_documents(name):
    cfg = VARIANTS[name]
    params = params_of(cfg)
    packed = decoder.forward(params, TOKENS, cfg, segments=SEGMENTS)
    assert packed.shape == (3, 7, 17) and packed.dtype == torch.float64
    for row, (tokens, segments) in enumerate(zip(TOKENS, SEGMENTS, strict=True)):
        for number in segments.unique():
            alone = decoder.forward(params, tokens[segments == number], cfg)
            torch.testing.assert_close(packed[row][segments == number], alone)


def test_causal():
    params, changed = params_of(CFG), TOKENS.clone()
    changed[:, 4:] = 0
    a, b = (decoder.forward(params, t, CFG) for t in (TOKENS, changed))
    torch.testing.assert_close(a[:, :4], b[:, :4])
    assert (a[:, 4:] != b[:, 4:]).any()


@pytest.mark.each_value
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("name", slow_after(2, VARIANTS))
def test_first_order(name, comm):
    cfg, comm = VARIANTS[name], COMMS[comm]
    params = params_of(cfg)
    # Reverse mode: functional against plain autograd through the same tensors.
    leaves, structure = tree.flatten(params)
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    value = loss(tree.unflatten(structure, tracked), TOKENS, SEGMENTS, cfg)
    wanted = torch.autograd.grad(value, tracked)
    got = grad(loss)(params, TOKENS, SEGMENTS, cfg, comm)
    close(got, wanted)
    assert all(leaf.any() for leaf in tree.leaves(got))
    # Forward mode along a direction, and the same by central differences.
    way = tree.map(lambda t: torch.sin(31 * t), params)
    slope = sum((g * w).sum() for g, w in zip(wanted, tree.leaves(way), strict=True))
    if comm is LOCAL:
        torch.testing.assert_close(jvp(lambda p: loss(p, TOKENS, SEGMENTS, cfg, comm), (params,), (way,))[1], slope)
    torch.testing.assert_close(
        difference(lambda p: loss(p, TOKENS, SEGMENTS, cfg, comm), params, way), slope, rtol=1e-6, atol=1e-8
    )
    # vmap is the loop, over batches and over per-example gradients.
    rows = list(zip(TOKENS, SEGMENTS, strict=True))
    close(
        vmap(lambda t, s: decoder.forward(params, t, cfg, comm, s))(TOKENS, SEGMENTS),
        torch.stack([decoder.forward(params, t, cfg, comm, s) for t, s in rows]),
    )
    each = vmap(lambda t, s: grad(loss)(params, t, s, cfg, comm))(TOKENS, SEGMENTS)
    loop = [grad(loss)(params, t, s, cfg, comm) for t, s in rows]
    close(each, tree.map(lambda *parts: torch.stack(parts), *loop))
    # Captured, with every tensor an argument.
    step = make_fx(lambda p, t, s: grad_and_value(loss)(p, t, s, cfg, comm), tracing_mode="fake")(
        params, TOKENS, SEGMENTS
    )
    grads, captured = step(params, TOKENS.flip(0), SEGMENTS.flip(0))
    torch.testing.assert_close(captured, loss(params, TOKENS.flip(0), SEGMENTS.flip(0), cfg))
    close(grads, wanted)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_is_that_of_the_logits(name, comm):
    """Compare the fused loss: head frozen and trained, tied and not, all at once and an example at a time."""
    cfg, comm, count = VARIANTS[name], COMMS[comm], torch.tensor(5.0)
    params, targets = params_of(cfg), TOKENS.roll(-1, -1).index_fill(-1, torch.tensor([2]), blocks.IGNORE)

    def whole(p, t, y, s):
        return blocks.cross_entropy(decoder.forward(p, t, cfg, comm, s), y, count)

    def fused(p, t, y, s):
        return decoder.loss(p, t, y, cfg, comm, s, count=count)

    def of_layers(f):
        return lambda layers, *rest: f(dataclasses.replace(params, layers=layers), *rest)

    data = (TOKENS, targets, SEGMENTS)
    close(grad_and_value(fused)(params, *data), grad_and_value(whole)(params, *data))
    close(grad(of_layers(fused))(params.layers, *data), grad(of_layers(whole))(params.layers, *data))
    each = (None, 0, 0, 0)
    close(vmap(grad(fused), each)(params, *data), vmap(grad(whole), each)(params, *data))


@pytest.mark.parametrize(
    ("name", "comm"),
    slow_after(1, dict.fromkeys([*zip(VARIANTS, TWICE, strict=False), *product(VARIANTS, TWICE)])),
)
def test_second_order(name, comm):
    cfg, comm = VARIANTS[name], COMMS[comm]
    params = params_of(cfg)
    way = tree.map(lambda t: torch.sin(31 * t), params)

    def slope(params, way, tokens, segments):
        grads = grad(loss)(params, tokens, segments, cfg, comm)
        return sum((g * w).sum() for g, w in zip(tree.leaves(grads), tree.leaves(way), strict=True))

    args = (way, TOKENS, SEGMENTS)
    twice = grad(slope)(params, *args)
    close(twice, difference(lambda p: grad(loss)(p, TOKENS, SEGMENTS, cfg), params, way), rtol=1e-5, atol=1e-7)
    close(make_fx(grad(slope), tracing_mode="fake")(params, *args)(params, *args), twice)
    if comm is LOCAL:
        forward = jvp(lambda p: grad(loss)(p, TOKENS, SEGMENTS, cfg), (params,), (way,))[1]
        close(forward, twice)


@dataclasses.dataclass
class Recorder:
    """A Comm that opens blocks and records its calls."""

    loads: list = dataclasses.field(default_factory=list)
    wraps: list = dataclasses.field(default_factory=list)

    def comm(self, cuts=lambda x: x):
        def open_(x):
            self.loads.append(type(x.inner).__name__)
            return x.inner

        def wrap(f):
            self.wraps.append(f.__name__)
            return f

        return Comm(open=open_, wrap=wrap, enter=cuts, exit=cuts)


def test_blocks_load_themselves():
    @dataclasses.dataclass
    class Shut(Loadable):
        inner: object

    for cfg, last in ((CFG, ["Final"]), (VARIANTS["tied"], ["Tensor", "Final"])):
        params, recorder = params_of(cfg), Recorder()
        shut = decoder.Params(Shut(params.embed), [Shut(layer) for layer in params.layers], Shut(params.final))
        got = decoder.forward(shut, TOKENS, cfg, recorder.comm())
        torch.testing.assert_close(got, decoder.forward(params, TOKENS, cfg))
        assert recorder.loads == ["Tensor", "Layer", "Layer", *last]
        assert recorder.wraps == ["_block", "_final"]


def test_enter_and_exit_frame_parallel_pairs():
    """Cut a block over two simulated ranks by hand: the sum over ranks at each exit gives the whole."""
    cfg = VARIANTS["biases, scaling"]
    layer = params_of(cfg).layers[0]
    names = decoder.dims(cfg)["layers.0"]
    cos, sin = rope(blocks.positions(TOKENS), cfg)
    x = torch.randn(3, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, _ = decoder._block(x, (layer, cos, sin, None, None), decoder._attend, cfg, LOCAL)

    def cut(rank):
        def one(name, weight):
            for dim, of in enumerate(names[name].split()):
                if of in ("heads", "kv_heads", "ffn"):
                    return weight.chunk(2, dim)[rank]
            return weight

        return tree.map_with_path(one, layer)

    # Ranks run one after another, so the other rank's part of each sum is computed first, exit by exit.
    sums = []
    for number in range(2):
        parts = []
        for rank in range(2):
            seen = iter(range(2))

            def exit_(y, seen=seen, parts=parts, number=number):
                i = next(seen)
                if i == number:
                    parts.append(y)
                return sums[i] if i < len(sums) else y

            decoder._block(x, (cut(rank), cos, sin, None, None), decoder._attend, cfg, Comm(exit=exit_))
        sums.append(parts[0] + parts[1])
    final = iter(sums)
    torch.testing.assert_close(
        decoder._block(x, (cut(0), cos, sin, None, None), decoder._attend, cfg, Comm(exit=lambda y: next(final)))[0],
        whole,
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_dims_init_agree(name):
    cfg = VARIANTS[name]
    like = decoder.shapes(cfg, torch.bfloat16)
    params = decoder.init(cfg, random.key(3), torch.bfloat16)
    assert tree.structure(like) == tree.structure(params)
    flat = {}
    for block, inner in decoder.dims(cfg).items():
        flat |= {f"{block}.{path}".rstrip("."): names.split() for path, names in inner.items()}
    assert list(flat) == tree.paths(like)
    size = {"vocab": 17, "embed": 12, "heads": 16, "kv_heads": 8, "head": 4, "ffn": 20}
    for (path, meta), real in zip(tree.items(like), tree.leaves(params), strict=True):
        assert meta.is_meta and meta.dtype == real.dtype == torch.bfloat16
        assert tuple(meta.shape) == tuple(real.shape) == tuple(size[n] for n in flat[path])


def test_init():
    cfg = Config(256, 128, 2, 4, 2, 32, 256, attention_bias=True, qk_norm=True, family="qwen3")
    params = decoder.init(cfg, random.key(0))
    for path, leaf in tree.items(params):
        if leaf.dim() == 2:  # at least 8192 draws: std within 5 of its own deviations
            assert abs(leaf.std() / 0.02 - 1) < 5 / (2 * leaf.numel()) ** 0.5, path
        else:
            assert (leaf == float(path.endswith("norm"))).all(), path
    assert not torch.equal(params.layers[0].q, params.layers[1].q)
    close(params, decoder.init(cfg, random.key(0)), rtol=0, atol=0)
    assert not torch.equal(params.embed, decoder.init(cfg, random.key(1)).embed)


def test_stream_has_the_embeddings_dtype():
    params = params_of(CFG, torch.float32)
    mixed = dataclasses.replace(params, embed=params.embed.bfloat16())
    assert decoder.forward(mixed, TOKENS, CFG).dtype == torch.bfloat16


CALLS = {  # each of the two takes the parameters, tokens, a config and segments
    "forward": lambda p, t, cfg, s=None: decoder.forward(p, t, cfg, segments=s),
    "loss": lambda p, t, cfg, s=None: decoder.loss(p, t, t.long(), cfg, segments=s),
}
META = TOKENS.to("meta")
REFUSED = {  # changes of the config, tokens, segments, the error
    "layers": ({"num_layers": 3}, TOKENS, None, ValueError, "layers: 2 of them, want num_layers = 3"),
    "length": (
        {"max_positions": 6},
        TOKENS,
        None,
        ValueError,
        "tokens: 7 in a sequence, want at most max_positions = 6; cut them",
    ),
    "floats": ({}, TOKENS.float(), None, TypeError, r"tokens: torch.float32, want int64 or int32; use tokens.long\(\)"),
    "bytes": ({}, TOKENS.byte(), None, TypeError, r"tokens: torch.uint8, want int64 or int32; use tokens.long\(\)"),
    "a scalar": ({}, TOKENS[0, 0], None, ValueError, r"tokens: shape \(\), want \[... t\]; use tokens\[None\]"),
    "beyond": ({}, TOKENS + 8, None, IndexError, r"tokens: 17 at \[0, 5\], want 0 to 16; use the tokenizer"),
    "below": ({}, TOKENS - 2, None, IndexError, r"tokens: -1 at \[0, 1\], want 0 to 16"),
    "device": (
        {},
        META,
        None,
        ValueError,
        r"tokens: on meta, want the embedding's device cpu; use tokens.to\('cpu'\)",
    ),
    "segments": (
        {},
        TOKENS,
        SEGMENTS[0],
        ValueError,
        r"segments: shape \(7,\), want the tokens' \(3, 7\); give one number for each token",
    ),
    "device of segments": (
        {},
        TOKENS,
        SEGMENTS.to("meta"),
        ValueError,
        r"segments: on meta, want the tokens' device cpu; use segments.to\('cpu'\)",
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, call):
    change, tokens, segments, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(params_of(CFG), tokens, dataclasses.replace(CFG, **change), segments)


TARGETS = {
    "shape": (
        TOKENS[:, 1:],
        ValueError,
        r"targets: shape \(3, 6\), want the tokens' \(3, 7\); give one number for each",
    ),
    "floats": (TOKENS.float(), TypeError, r"targets: torch.float32, want int64 or int32; use targets.long\(\)"),
    "device": (META, ValueError, r"targets: on meta, want the tokens' device cpu; use targets.to\('cpu'\)"),
    "beyond": (TOKENS + 8, IndexError, r"target 17 in row 5; wanted one in \[0, 17\), or -100 to ignore it"),
}


@pytest.mark.parametrize(("targets", "error", "message"), TARGETS.values(), ids=TARGETS)
def test_refused_targets(targets, error, message):
    with pytest.raises(error, match=message):
        decoder.loss(params_of(CFG), TOKENS, targets, CFG)


def test_values_of_tokens_are_read_in_eager_code_only():
    """Check that a gradient names a bad token; vmap and a capture leave it to the lookup."""
    params, wrong = params_of(CFG), TOKENS + 8
    with pytest.raises(IndexError, match=r"tokens: 17 at \[0, 5\]"):
        grad(decoder.loss)(params, wrong, TOKENS, CFG)
    with pytest.raises(IndexError, match="index out of range"):
        vmap(lambda t: decoder.forward(params, t, CFG))(wrong)
    captured = make_fx(lambda p, t: decoder.forward(p, t, CFG), tracing_mode="fake")(params, wrong)
    assert captured(params, TOKENS).shape == (3, 7, 17)
    with pytest.raises(IndexError, match="index out of range"):
        captured(params, wrong)
    packed = dataclasses.replace(params, embed=quantize(params.embed.float(), NF4))
    with pytest.raises(IndexError, match=r"tokens: -1 at \[0, 1\]"):  # of packed codes -1 would be the last row
        decoder.forward(packed, TOKENS - 2, CFG)
