"""Tiny transformers models with random PEFT adapters, and their weights as trees by module name."""

import peft
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

TOKENS = torch.arange(20).reshape(2, 10) * 3 % 64
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 32, "initializer_range": 0.2}


def llama(layers=2, **options):
    torch.manual_seed(0)
    options = {"tie_word_embeddings": False} | options
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=layers, **SIZES | options)  # type: ignore[arg-type]
    ).eval()


def biased(**options):
    """A Llama whose attention has biases that are not zero."""
    return shake(llama(attention_bias=True, **options), lambda name: name.endswith(".bias"))


def experts(layers=1):
    """A Qwen3 with experts: parameters [4 24 16] and [4 16 12] of one module."""
    torch.manual_seed(0)
    more = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
    config = transformers.Qwen3MoeConfig(num_hidden_layers=layers, **SIZES | more)  # type: ignore[arg-type]
    return transformers.Qwen3MoeForCausalLM(config).eval()


def gpt2():
    """A GPT-2, whose weights are stored as [in out]."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def shake(model, chosen, seed=1):
    """Add noise to the parameters whose name is ``chosen``."""
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if chosen(name):
            p.data += torch.randn_like(p) * 0.2
    return model


def adapted(model, seed=1, **options):
    """The model with an adapter of these options, and noise in all that the adapter trains."""
    theirs = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    trained = {name for name, p in theirs.named_parameters() if p.requires_grad}
    return shake(theirs, trained.__contains__, seed)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def weights(model):
    """The parameters by our paths: names of modules, and those and ``_bias``; every matrix is [out in]."""
    turned = {name for name, module in model.named_modules() if isinstance(module, Conv1D)}
    out = {}
    for name, p in model.named_parameters():
        module, _, kind = name.rpartition(".")
        value = p.data.clone().mT.contiguous() if module in turned and kind == "weight" else p.data.clone()
        out[{"weight": module, "bias": f"{module}_bias"}.get(kind, name)] = value
    return out


def put(model, values):
    """Write the ``weights`` of a model back; tied ones become one for each module."""
    turned = {name for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name in [name for name, _ in model.named_parameters()]:
        module, _, kind = name.rpartition(".")
        value = values[{"weight": module, "bias": f"{module}_bias"}.get(kind, name)]
        value = value.mT if module in turned and kind == "weight" else value
        setattr(model.get_submodule(module), kind, nn.Parameter(value.contiguous()))
    return model
