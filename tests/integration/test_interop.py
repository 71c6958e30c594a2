"""From end to end with the peers: our model on packed weights against transformers and PEFT on the dequantised ones."""

import dataclasses
from functools import partial

import bitsandbytes.functional as bnb
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine
from transformers import AutoModelForCausalLM

from fquant import FP4, INT8, NF4, NF4_DQ, dequantize, linear, lora, quantize, random, tree
from fquant.format import INT4, INT4_ZERO, bits
from fquant.io import peft
from fquant.packed import Packed
from models import decoder, hf
from models.config import Config

# PEFT asks transformers by a name that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CFG = Config(
    vocab=101, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=128, norm_eps=1e-5,
    rope_theta=10000.0, rope_scaling=None, max_positions=64, tied=False, attention_bias=False, mlp_bias=False,
)  # fmt: skip
WEIGHTS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
KINDS = {
    "lora": dict(),
    "rank-stabilised": dict(rank_stabilised=True),
    "dora": dict(dora=True),
}
TOKENS = torch.arange(2 * 17).reshape(2, 17) * 7 % CFG.vocab


@pytest.fixture(params=[NF4, NF4_DQ, FP4, INT8], ids=lambda f: f.name)
def packed(request, tmp_path):
    """A packed base, and the same model as transformers has it."""
    params = decoder.init(CFG, random.key(3), torch.float32)
    params = tree.map(lambda t: t * 5 if t.ndim == 2 else t, params)  # so that logits are not all alike
    base = tree.map_at(WEIGHTS, partial(quantize, format=request.param), params)
    hf.save(tmp_path / "base", CFG, tree.map_at(WEIGHTS, dequantize, base))
    return base, AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()


def trained(base, **options):
    """Adapters that do something."""
    adapters = lora.init(base, r"layers\.\d+\.(q|v|o|up|down)", rank=4, alpha=6.0, key=1, **options)
    noise = lambda path, t: t + 0.1 * random.normal(random.fold(random.key(7), path), t.shape)
    return tree.map_with_path(noise, adapters)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_saved_here_gives_the_same_logits_in_peft(kind, packed, tmp_path):
    base, model = packed
    adapters = trained(base, **KINDS[kind])
    peft.save(tmp_path / "adapter", adapters, partial(hf.module_name, cfg=CFG))
    with torch.no_grad():
        plain = model(TOKENS).logits
        theirs = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()(TOKENS).logits
    ours = decoder.forward(lora.attach(base, adapters), TOKENS, CFG)
    assert (plain - theirs).abs().max() > 1e-2  # the adapter does something
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    merged = decoder.forward(lora.merge(base, adapters, torch.float32), TOKENS, CFG)
    torch.testing.assert_close(merged, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_saved_by_peft_gives_the_same_logits_here(kind, packed, tmp_path):
    base, model = packed
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM",
        use_rslora=kind == "rank-stabilised", use_dora=kind == "dora",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = get_peft_model(model, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    adapters = peft.load(tmp_path / "adapter", partial(hf.path_of, cfg=CFG))
    assert set(adapters) == {f"layers.{i}.{name}" for i in range(2) for name in ("q", "down")}
    with torch.no_grad():
        wanted = theirs(TOKENS).logits
    torch.testing.assert_close(decoder.forward(lora.attach(base, adapters), TOKENS, CFG), wanted, atol=1e-5, rtol=1e-5)


def test_gradients_of_adapters_equal_pefts(tmp_path):
    """On the packed base here, on the dequantised base there."""
    params = tree.map(lambda t: t * 5 if t.ndim == 2 else t, decoder.init(CFG, random.key(3), torch.float32))
    base = tree.map_at(WEIGHTS, partial(quantize, format=NF4_DQ), params)
    assert isinstance(base.layers[0].q, Packed)
    hf.save(tmp_path / "base", CFG, tree.map_at(WEIGHTS, dequantize, base))
    adapters = trained(base)
    peft.save(tmp_path / "adapter", adapters, partial(hf.module_name, cfg=CFG))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    torch.log_softmax(model(TOKENS).logits, -1)[..., 0].mean().backward()

    def loss(adapters):
        return torch.log_softmax(decoder.forward(lora.attach(base, adapters), TOKENS, CFG), -1)[..., 0].mean()

    ours = torch.func.grad(loss)(adapters)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(theirs) == 2 * len(ours)
    for path, g in ours.items():
        module = f"base_model.model.{hf.module_name(path, CFG)}"
        for name, mine in (("lora_A", g.a), ("lora_B", g.b)):
            wanted = theirs[f"{module}.{name}.default.weight"]
            torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-4)


def test_configuration_is_what_transformers_reads(tmp_path):
    cfg = dataclasses.replace(CFG, tied=True)
    hf.save(tmp_path, cfg, decoder.init(cfg, random.key(0), torch.bfloat16))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.config.tie_word_embeddings and hf.load(tmp_path)[0] == cfg


@pytest.mark.parametrize("format", [NF4, FP4], ids=str)
def test_layouts_equal_bitsandbytes_at_multiples_of_the_block_and_flat(format):
    for width, flat in ((128, False), (100, True), (100, False)):
        w = random.normal(random.key(width), (8, width))
        p, (codes, state) = (
            quantize(w, dataclasses.replace(format, flat=flat)),
            bnb.quantize_4bit(w, quant_type=format.name),
        )
        same = [torch.equal(a.flatten(), b.flatten()) for a, b in ((p.codes, codes), (p.scale, state.absmax))]
        assert same == ([True, True] if flat or width == 128 else [False, False])


TORCHAO = {  # format, mapping, least integer, dtype of the weight -> the share of codes that differ
    "asymmetric": (INT4_ZERO, MappingType.ASYMMETRIC, 0, torch.float32, 0, 0),
    "symmetric": (INT4, MappingType.SYMMETRIC, -7, torch.float32, 0, 0),
    "symmetric from -8": (INT4, MappingType.SYMMETRIC, -8, torch.float32, 0.12, 0.15),
    "asymmetric bf16": (INT4_ZERO, MappingType.ASYMMETRIC, 0, torch.bfloat16, 1e-4, 0.04),
    "symmetric bf16": (INT4, MappingType.SYMMETRIC, -7, torch.bfloat16, 1e-4, 0.04),
}


@pytest.mark.parametrize(("format", "mapping", "low", "dtype", "least", "most"), TORCHAO.values(), ids=TORCHAO)
def test_codes_equal_torchao_as_the_readme_says(format, mapping, low, dtype, least, most):
    first, last = format.integers
    w = random.normal(random.key(0), (64, 512)).to(dtype)
    scale, zero = choose_qparams_affine(w, mapping, (1, 128), torch.int32, low, last, zero_point_dtype=torch.int32)
    theirs = quantize_affine(w, (1, 128), scale, zero, torch.int32, low, last) - first
    differ = (bits.unpack(quantize(w, format).codes, 4, 512) != theirs).float().mean()
    assert least <= differ <= most


X = random.normal(random.key(1), (4, 128))
PRODUCT = lambda p, x: linear(x, p).square()
COMPILED = {"product": lambda p: partial(PRODUCT, p), "grad": lambda p: grad(lambda x: PRODUCT(p, x).sum())}
REFUSED = {
    "vmap": lambda p: vmap(partial(PRODUCT, p)),
    "jacrev": lambda p: jacrev(lambda x: PRODUCT(p, x).sum(-1)),
    "jacfwd": lambda p: jacfwd(lambda x: PRODUCT(p, x).sum(-1)),
    "hessian": lambda p: hessian(lambda x: PRODUCT(p, x).sum()),
    "jvp": lambda p: lambda x: jvp(partial(PRODUCT, p), (x,), (x,))[1],
}


@pytest.mark.parametrize("name", [*COMPILED, *REFUSED])
def test_torch_compile_takes_what_the_readme_says(name):
    f = (COMPILED | REFUSED)[name](quantize(random.normal(random.key(0), (16, 128)), NF4))
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    if name in COMPILED:
        torch.testing.assert_close(compiled(X), f(X))
        return
    with pytest.raises(RuntimeError, match="when making fake tensor call|Observed exception"):  # torch 2.13, 2.14
        compiled(X)
    torch._dynamo.reset()
    traced = torch.compile(make_fx(f)(X), backend="eager", fullgraph=name != "jvp")
    torch.testing.assert_close(traced(X), f(X))
