"""One QLoRA step of PEFT with bitsandbytes on a CUDA device; prints a line of JSON with seconds and the peak in bytes.

python -m tests.bench.gpu.peft_side LAYERS DIM HIDDEN VOCAB HEADS KV_HEADS BATCH SEQ STEPS
"""

import json
import sys
import time
from typing import Any

import torch

from tests.bench import peers
from tests.bench.gpu.lines import alone


def main(args: list[str]) -> None:
    """Build the model on the device, take steps, and print the figures."""
    layers, dim, hidden, vocab, heads, kv_heads, batch, seq, steps = map(int, args)
    with peers.quiet():
        import bitsandbytes as bnb
        import peft
        import transformers
    names: dict[str, Any] = {
        "hidden_size": dim, "num_hidden_layers": layers, "intermediate_size": hidden, "vocab_size": vocab,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": False,
        "attn_implementation": "sdpa", "max_position_embeddings": max(seq, 2048),
    }  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**names))
    more: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                sizes = child.in_features, child.out_features
                with torch.device("meta"):
                    linear = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, **more)
                linear.weight = bnb.nn.Params4bit(child.weight.data.cpu(), requires_grad=False, **more)
                setattr(module, name, linear.to("cuda"))
    torch.set_default_dtype(torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=16, target_modules=targets))
    model.train()
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    tokens = torch.randint(0, vocab, (batch, seq), device="cuda")

    def take() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    take()
    with alone(torch.device("cuda")):
        take()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(steps):
            take()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / steps
    print(json.dumps({"seconds": seconds, "peak": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main(sys.argv[1:])
