"""Vectors before the tokens, and multiplicative adapters, against transformers and PEFT."""

import dataclasses

import peft
import pytest
import torch
import transformers
from torch.func import grad, vmap

from fquant import NF4, jit, linear, lora, quantize, tree
from fquant.io import peft_ia3
from models import decoder, hf
from tests.helpers.arrays import normal
from tests.helpers.peft_models import SIZES, TOKENS, biased, llama, shake


def gemma():
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        num_hidden_layers=2, head_dim=4, query_pre_attn_scalar=4, attn_implementation="eager",
        **{"pad_token_id": 0} | SIZES,
    )  # fmt: skip
    return shake(transformers.Gemma2ForCausalLM(config).eval(), lambda name: "norm" in name)


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
MODELS = {"llama": llama, "biased": biased, "gemma": gemma}


def ours(model, folder):
    """Return the config and the parameters of a model of transformers, in float32."""
    model.save_pretrained(folder)
    return hf.load(folder)


@pytest.mark.parametrize("given", ["soft prompt", "no tokens"])
@pytest.mark.parametrize("name", MODELS)
def test_vectors_before_the_tokens(name, given, tmp_path):
    """Compare logits, and the gradient of the vectors, with transformers' ``inputs_embeds``."""
    model = MODELS[name]()
    cfg, params = ours(model, tmp_path)
    tokens = TOKENS if given == "soft prompt" else TOKENS[:, :0]
    vectors = normal(2, 3, cfg.dim, dtype=torch.float32)
    table = model.get_input_embeddings()
    theirs = vectors.clone().requires_grad_()
    wanted = model(inputs_embeds=torch.cat([theirs, table(tokens)], 1), use_cache=False).logits
    logits = decoder.forward(params, tokens, cfg, inputs_embeds=vectors)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    targets = torch.arange(wanted.shape[1]).expand(2, -1) % 64
    torch.nn.functional.cross_entropy(wanted.flatten(0, 1), targets.flatten()).backward()
    f = lambda vectors, params, tokens, targets: decoder.loss(params, tokens, targets, cfg, inputs_embeds=vectors)
    found = grad(f)(vectors, params, tokens, targets)
    torch.testing.assert_close(found, theirs.grad, rtol=1e-3, atol=1e-6)
    captured = jit(lambda *args: grad(f)(*args))(vectors, params, tokens, targets)
    torch.testing.assert_close(captured, found, rtol=1e-4, atol=1e-6)


def test_one_soft_prompt_for_all_examples(tmp_path):
    cfg, params = ours(llama(), tmp_path)
    prompt = normal(3, cfg.dim, dtype=torch.float32)
    targets = torch.nn.functional.pad(TOKENS, (2, 1), value=-100)
    f = lambda prompt, tokens, targets: decoder.loss(params, tokens, targets, cfg, count=1, inputs_embeds=prompt)
    each = vmap(grad(f), (None, 0, 0))(prompt, TOKENS, targets)
    torch.testing.assert_close(each.sum(0), grad(f)(prompt, TOKENS, targets), rtol=1e-4, atol=1e-6)
    segments = torch.zeros(2, 13, dtype=torch.int64)
    packed = decoder.forward(params, TOKENS, cfg, segments=segments, inputs_embeds=prompt)
    torch.testing.assert_close(packed, decoder.forward(params, TOKENS, cfg, inputs_embeds=prompt))


@pytest.mark.parametrize("fault", ["targets", "length"])
def test_shapes_that_do_not_fit(fault, tmp_path):
    cfg, params = ours(llama(), tmp_path)
    long = torch.zeros(30, cfg.dim)
    if fault == "length":
        with pytest.raises(ValueError, match="tokens: 40 in a sequence, want at most max_positions = 32"):
            decoder.forward(params, TOKENS, cfg, inputs_embeds=long)
    else:
        with pytest.raises(ValueError, match=r"targets: shape \(2, 10\), want the tokens' \(2, 13\)"):
            decoder.loss(params, TOKENS, TOKENS, cfg, inputs_embeds=long[:3])


# --- (IA)³ ------------------------------------------------------------------------------------------------------------

TARGETS = {
    "the paper's": (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "all, o by outputs": (["q_proj", "o_proj", "up_proj", "down_proj", "gate_proj"], ["up_proj"]),
}


def with_ia3(model, targets, feedforward):
    config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=targets, feedforward_modules=feedforward)
    return shake(peft.get_peft_model(model, config).eval(), lambda name: "ia3_l" in name)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("name", MODELS)
def test_ia3_equals_peft(name, targets, tmp_path):
    """Compare logits, gradients of all factors, and the directory in both directions."""
    model = MODELS[name]()
    cfg, params = ours(model, tmp_path / "base")
    theirs = with_ia3(model, *TARGETS[targets])
    theirs.save_pretrained(tmp_path / "adapter")
    adapters = peft_ia3.load(tmp_path / "adapter", lambda module: hf.path_of(module, cfg))
    out = theirs(TOKENS, labels=TOKENS)
    got = decoder.forward(lora.attach(params, adapters), TOKENS, cfg)
    torch.testing.assert_close(got, out.logits, rtol=1e-4, atol=1e-4)
    out.loss.backward()
    labels = torch.nn.functional.pad(TOKENS[:, 1:], (0, 1), value=-100)
    found = grad(lambda a: decoder.loss(lora.attach(params, a), TOKENS, labels, cfg))(adapters)
    grads = {n: p.grad.flatten() for n, p in theirs.named_parameters() if "ia3_l" in n}
    assert len(grads) == len(found) == cfg.num_layers * len(TARGETS[targets][0])
    for path, ia3 in found.items():
        wanted = grads[f"base_model.model.{hf.module_name(path, cfg)}.ia3_l.default"]
        torch.testing.assert_close(tree.leaves(ia3)[0], wanted, rtol=1e-3, atol=1e-6, msg=path)
    peft_ia3.save(tmp_path / "again", adapters, lambda path: hf.module_name(path, cfg))
    again = peft.PeftModel.from_pretrained(MODELS[name](), tmp_path / "again").eval()
    assert torch.equal(again(TOKENS).logits, out.logits)


def test_ia3_on_packed_weights():
    base = {"q": quantize(normal(48, 64, dtype=torch.float32), NF4), "n": torch.ones(3)}
    adapters = lora.init_ia3(base, "q", "q")
    x, bias = normal(5, 64, dtype=torch.float32), normal(48, dtype=torch.float32)
    assert torch.equal(linear(x, lora.attach(base, adapters)["q"], bias), linear(x, base["q"], bias))
    adapters = tree.map(lambda t: t + normal(*t.shape, dtype=torch.float32), adapters)
    f = lambda adapters, x, bias: linear(x, lora.attach(base, adapters)["q"], bias)
    wanted = adapters["q"].outputs * (linear(x * adapters["q"].inputs, base["q"]) + bias)
    torch.testing.assert_close(f(adapters, x, bias), wanted)
    half = f(adapters, x.bfloat16(), bias)
    assert half.dtype == torch.bfloat16
    loops = [grad(lambda a, x: f(a, x, bias).sin().sum())(adapters, row) for row in x]
    mapped = vmap(grad(lambda a, x: f(a, x, bias).sin().sum()), (None, 0))(adapters, x)
    # Sines of values near 100 in float32, whose last bit is 8e-6, summed in other orders.
    torch.testing.assert_close(tree.leaves(mapped), tree.leaves(lora.stack(loops)), rtol=1e-3, atol=1e-3)


def test_ia3_refusals(tmp_path):
    base = {"q": normal(48, 64, dtype=torch.float32)}
    both = lora.init_ia3(base, "q", "q")
    with pytest.raises(ValueError, match=r"q: inputs \(48,\) do not fit a weight \(48, 64\); wanted \(64,\)"):
        lora.attach(base, {"q": dataclasses.replace(both["q"], inputs=torch.ones(48))})
    with pytest.raises(ValueError, match="q: merge got IA3, which is not implemented"):
        lora.merge(base, both)
    with pytest.raises(ValueError, match="q: merge-aware got IA3"):
        lora.attach(base, both, merge_aware=True)
    for verb in (lambda: lora.scale(both, 2.0), lambda: lora.combine([both], [1.0])):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="q: got Ia3, wanted a Lora"):
            verb()
    with pytest.raises(ValueError, match="q: got factors of inputs and outputs"):
        peft_ia3.save(tmp_path, both, str)
    with pytest.raises(ValueError, match="targets 'k' match no weight"):
        lora.init_ia3(base, "k")
