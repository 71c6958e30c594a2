"""The ``config.json`` of a Hugging Face folder, read as a Config and written from one.

:func:`from_hf` is strict: a key is understood, known to be without effect on the forward pass, or an error. An unknown
option could change the result, and a refused file is better than a wrong logit. An absent or null key has LlamaConfig's
default if that determines the model (no biases, no grouping of heads), and is otherwise an error. A Qwen3 must state
its heads, because its classes in transformers assume others.

Both spellings of the rotary embedding are read: ``rope_theta`` and ``rope_scaling`` of transformers 4, and
``rope_parameters`` of transformers 5. :func:`to_hf` writes both, so that either version loads it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from .config import Config, RopeScaling


def _read(wanted: str, is_valid: Callable[[Any], bool], raw: dict[str, Any], key: str, default: Any = None) -> Any:
    if (got := raw.get(key, default)) is None:
        raise ValueError(f"{key} is missing; every config wants it, take it from the model's original config.json")
    if not is_valid(got):
        raise ValueError(f"{key} = {got!r}, want {wanted}")
    return got


_integer = partial(_read, "a positive integer", lambda got: type(got) is int and got >= 1)
_float = partial(_read, "a positive number", lambda got: type(got) in (int, float) and 0 < got < float("inf"))
_boolean = partial(_read, "true or false", lambda got: type(got) is bool, default=False)
_number = lambda *args: float(_float(*args))

# Key of config.json -> field of Config, and the function that reads and checks the value.
KEYS: dict[str, tuple[str, Callable[[dict[str, Any], str], Any]]] = {
    "vocab_size": ("vocab", _integer), "hidden_size": ("dim", _integer), "num_hidden_layers": ("num_layers", _integer),
    "num_attention_heads": ("num_heads", _integer), "num_key_value_heads": ("num_kv_heads", _integer),
    "head_dim": ("head_dim", _integer), "intermediate_size": ("hidden", _integer),
    "rms_norm_eps": ("norm_eps", _number), "max_position_embeddings": ("max_positions", _integer),
    "tie_word_embeddings": ("tied", _boolean), "attention_bias": ("attention_bias", _boolean),
    "mlp_bias": ("mlp_bias", _boolean),
}  # fmt: skip
# Rope type -> its options, in the order of RopeScaling's fields.
ROPE_OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}

# Model type -> its class in transformers, and its name in messages.
KINDS = {"llama": ("LlamaForCausalLM", "Llama"), "qwen3": ("Qwen3ForCausalLM", "Qwen3")}

# Keys that concern the tokenizer, generation, loading or training from scratch, or have no effect at all.
_HARMLESS = frozenset(
    """_name_or_path transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id
    sep_token_id decoder_start_token_id initializer_range pretraining_tp output_attentions output_hidden_states
    return_dict return_dict_in_generate id2label label2id problem_type chunk_size_feed_forward max_length
    tokenizer_class prefix torchscript use_bfloat16 tf_legacy_loss task_specific_params finetuning_task
    attn_implementation _attn_implementation_autoset is_llama_config unsloth_fixed unsloth_version
    do_sample temperature top_k top_p min_length num_beams repetition_penalty""".split()
)
# Keys that would change the forward pass, except at this value; and the fix.
_ONLY: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "use a checkpoint whose MLP is SwiGLU"),
    "attention_dropout": (0.0, "set it to 0.0: dropout inside the attention is not implemented"),
    "is_encoder_decoder": (False, "use a decoder-only checkpoint"),
    "add_cross_attention": (False, "use a decoder-only checkpoint"),
    "rope_interleaved": (False, "use a checkpoint whose heads are laid out in halves, as transformers does"),
    "pruned_heads": ({}, "save the pruned model with its real number of heads"),
    "partial_rotary_factor": (1.0, "use a checkpoint that rotates the whole head"),
}


def from_hf(raw: dict[str, Any]) -> Config:
    """Convert a parsed ``config.json``; raise ValueError with the key, its value, the wanted value and a fix."""
    raw = {key: item for key, item in raw.items() if item is not None}
    if (kind := raw.pop("model_type", None)) not in tuple(KINDS):
        raise ValueError(f"model_type = {kind!r}, want {' or '.join(map(repr, KINDS))}; others are not implemented")
    architecture, name = KINDS[kind]
    _refuse_others(raw, "architectures", [architecture], "save the causal language model")
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method") if isinstance(raw["quantization_config"], dict) else "?"
        fault = f"the checkpoint is already quantised ({method}), want float weights"
        raise ValueError(f"quantization_config: {fault}; use the original checkpoint and quantize it here")
    for key, (wanted, fix) in _ONLY.items():
        _refuse_others(raw, key, wanted, fix)
    theta, scaling = _rope(raw)
    if kind == "qwen3":
        _refuse_windows(raw)
    else:
        dim, num_heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
        if "head_dim" not in raw and dim % num_heads:
            fault = f"hidden_size = {dim} is not a multiple of num_attention_heads = {num_heads}"
            raise ValueError(f"{fault}; correct one of them")
        raw = {"num_key_value_heads": num_heads, "head_dim": dim // num_heads} | raw
    fields = {field: read(raw, key) for key, (field, read) in KEYS.items()}
    if (heads := fields["num_heads"]) % (kv := fields["num_kv_heads"]):
        fault = f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv}"
        raise ValueError(f"{fault}; correct one of them")
    cfg = Config(**fields, rope_theta=theta, rope_scaling=scaling, qk_norm=kind == "qwen3")
    if unknown := sorted(raw.keys() - KEYS - ROPE_KEYS - _HARMLESS):
        fault = f"is not a key of a {name} config that is known here, and it may change the forward pass"
        raise ValueError(f"{unknown[0]} = {raw[unknown[0]]!r} {fault}; remove it if it does not")
    return cfg


def to_hf(cfg: Config) -> dict[str, Any]:
    """Return the ``config.json`` of ``cfg`` for transformers 4 and 5; :func:`from_hf` inverts it."""
    scaling: dict[str, Any] | None = None
    if (rope := cfg.rope_scaling) is not None:
        values = (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position)
        scaling = {"rope_type": rope.kind, **dict(zip(ROPE_OPTIONS[rope.kind], values, strict=False))}
    kind = "qwen3" if cfg.qk_norm else "llama"
    keys = {key: getattr(cfg, field) for key, (field, _) in KEYS.items()}
    if cfg.qk_norm:
        del keys["mlp_bias"]
        keys["use_sliding_window"] = False
    return {
        "architectures": [KINDS[kind][0]], "model_type": kind, **keys, "hidden_act": "silu", "attention_dropout": 0.0,
        "rope_theta": cfg.rope_theta, "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": cfg.rope_theta, **(scaling or {"rope_type": "default"})},
        "bos_token_id": None, "eos_token_id": None,  # absent would mean 1 and 2
    }  # fmt: skip


def _refuse_others(raw: dict[str, Any], key: str, wanted: Any, fix: str) -> None:
    """Remove ``key`` from ``raw``; raise ValueError unless it was absent or ``wanted``."""
    if (got := raw.pop(key.rpartition(".")[2], wanted)) != wanted:
        raise ValueError(f"{key} = {got!r}, want {wanted!r}; {fix}")


def _refuse_windows(raw: dict[str, Any]) -> None:
    """Remove Qwen3's keys of sliding windows from ``raw``; raise ValueError if windows are in use."""
    _refuse_others(raw, "use_sliding_window", False, "sliding windows are not implemented")
    full = ["full_attention"] * _integer(raw, "num_hidden_layers")
    if (got := raw.pop("layer_types", full)) != full:
        raise ValueError(f"layer_types = {got!r}, want 'full_attention' for each of {len(full)} layers; correct it")
    for unused in ("sliding_window", "max_window_layers"):
        raw.pop(unused, None)


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read base and scaling from either spelling, or from both if they agree."""
    old, new = _rope_table("rope_scaling", raw), _rope_table("rope_parameters", raw)
    if "rope_theta" in raw:
        old = {"rope_theta": raw["rope_theta"]} | old
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            other = f"but the older spelling says {old[key]!r}"
            raise ValueError(f"rope_parameters.{key} = {new[key]!r}, {other}; remove one of them")
    both = old | new
    kind, theta = both.pop("rope_type", "default"), _number(both, "rope_theta", 10000.0)
    _refuse_others(both, "rope_parameters.partial_rotary_factor", 1.0, "whole heads are rotated here")
    if kind not in ("default", *ROPE_OPTIONS):
        wanted = f"want one of default, {', '.join(ROPE_OPTIONS)}"
        raise ValueError(f"rope_parameters.rope_type = {kind!r}, {wanted}; other scalings are not implemented")
    wanted = ROPE_OPTIONS.get(kind, ())
    if unknown := sorted(both.keys() - {"rope_theta", *wanted}):
        got = f"rope_parameters.{unknown[0]} = {both[unknown[0]]!r}"
        raise ValueError(f"{got} is unknown for rope type {kind!r}; remove it")
    values = [(_integer if key == "original_max_position_embeddings" else _number)(both, key) for key in wanted]
    return theta, RopeScaling(kind, *values) if values else None  # type: ignore[arg-type]


def _rope_table(key: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the table at ``key``, with 'type' under its newer name 'rope_type'."""
    table = raw.get(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"{key} = {table!r}, want a table of options")
    table = {name: item for name, item in table.items() if item is not None}
    if (old := table.pop("type", None)) is not None:  # the name of rope_type before transformers 4.45
        if table.setdefault("rope_type", old) != old:
            raise ValueError(f"{key}: type = {old!r}, but rope_type = {table['rope_type']!r}; remove one of them")
    return table
