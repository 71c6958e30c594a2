"""The keys of ``config.json`` that all families share: readers of values, harmless keys, and keys with one value.

A key of a config is in exactly one of these tables, in the rope table, or in a family's own (``families.py``). Any
other key is refused.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

LARGEST = 2**31 - 1  # of any size; a larger one is a fault of the file
MOST_LAYERS = 4096  # a tree is made for each, so a larger number would take memory before any other check


def read(wanted: str, is_valid: Callable[[Any], bool], raw: dict[str, Any], key: str, default: Any = None) -> Any:
    """Return ``raw[key]`` or the default; raise ValueError if it is missing or not valid."""
    if (got := raw.get(key, default)) is None:
        raise ValueError(f"{key} is missing; every config wants it, take it from the model's original config.json")
    if not is_valid(got):
        raise ValueError(f"{key} = {got!r:.80}, want {wanted}")
    return got


integer = partial(read, "a positive integer below 2^31", lambda got: type(got) is int and 1 <= got <= LARGEST)
layers = partial(read, f"an integer of 1 to {MOST_LAYERS}", lambda got: type(got) is int and 1 <= got <= MOST_LAYERS)
number = lambda *args: float(_float(*args))
_float = partial(read, "a positive number", lambda got: type(got) in (int, float) and 0 < got <= sys.float_info.max)
boolean = partial(read, "true or false", lambda got: type(got) is bool, default=False)

# Key of config.json -> field of Config, and the function that reads and checks the value.
Reader = Callable[[dict[str, Any], str], Any]
KEYS: dict[str, tuple[str, Reader]] = {
    "vocab_size": ("vocab", integer), "hidden_size": ("dim", integer), "num_hidden_layers": ("num_layers", layers),
    "num_attention_heads": ("num_heads", integer), "num_key_value_heads": ("num_kv_heads", integer),
    "head_dim": ("head_dim", integer), "intermediate_size": ("hidden", integer),
    "rms_norm_eps": ("norm_eps", number), "max_position_embeddings": ("max_positions", integer),
    "tie_word_embeddings": ("tied", boolean),
}  # fmt: skip

# Keys that concern the tokenizer, generation, loading or training from scratch, or have no effect at all.
HARMLESS = frozenset(
    """_name_or_path transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id
    sep_token_id decoder_start_token_id initializer_range pretraining_tp output_attentions output_hidden_states
    return_dict return_dict_in_generate id2label label2id problem_type chunk_size_feed_forward max_length
    tokenizer_class prefix torchscript use_bfloat16 tf_legacy_loss task_specific_params finetuning_task
    attn_implementation _attn_implementation _attn_implementation_autoset is_llama_config unsloth_fixed unsloth_version
    do_sample temperature top_k top_p min_length num_beams repetition_penalty auto_map transformers.js_config
    cache_implementation model_max_length image_token_id bos_token eos_token pad_token""".split()
)
# Keys that would change the forward pass, except at this value; and the fix.
ONLY: dict[str, tuple[Any, str]] = {
    "attention_dropout": (0.0, "set it to 0.0: dropout inside the attention is not implemented"),
    "is_encoder_decoder": (False, "use a decoder-only checkpoint"),
    "add_cross_attention": (False, "use a decoder-only checkpoint"),
    "rope_interleaved": (False, "use a checkpoint whose heads are laid out in halves, as transformers does"),
    "pruned_heads": ({}, "save the pruned model with its real number of heads"),
}


def refuse_others(raw: dict[str, Any], key: str, wanted: Any, fix: str) -> None:
    """Remove ``key`` from ``raw``; raise ValueError unless it was absent or ``wanted``."""
    if (got := raw.pop(key.rpartition(".")[2], wanted)) != wanted:
        raise ValueError(f"{key} = {got!r:.200}, want {wanted!r}; {fix}")
