"""Hf config: split from models.config."""

from __future__ import annotations

from typing import Any

from .config import ROPE_KINDS, Config, RopeScaling

# Model type -> the class in transformers that is meant, and what it is called in messages.
KINDS = {"llama": ("LlamaForCausalLM", "Llama"), "qwen3": ("Qwen3ForCausalLM", "Qwen3")}

# Keys that are read by others (tokenizer, generation, loading, training from scratch) or by nobody.
_HARMLESS = frozenset(
    """_name_or_path transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id
    sep_token_id decoder_start_token_id initializer_range pretraining_tp output_attentions output_hidden_states
    return_dict return_dict_in_generate id2label label2id problem_type chunk_size_feed_forward max_length
    tokenizer_class prefix torchscript use_bfloat16 tf_legacy_loss task_specific_params finetuning_task
    attn_implementation _attn_implementation_autoset is_llama_config unsloth_fixed unsloth_version
    do_sample temperature top_k top_p min_length num_beams repetition_penalty""".split()
)
# Keys that would change the forward pass, except at this value.
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
    """The Config of a parsed Hugging Face ``config.json``.

    Raises ValueError naming the key, what it is, what is wanted and what to do: for another architecture, activation
    or rope type, for a missing or unknown key, for heads that do not divide, and for pre-quantised checkpoints.
    """
    raw = {key: item for key, item in raw.items() if item is not None}
    if (kind := raw.pop("model_type", None)) not in tuple(KINDS):
        raise ValueError(f"model_type = {kind!r}, want {' or '.join(map(repr, KINDS))}; others are not implemented")
    architecture, name = KINDS[kind]
    if (got := raw.pop("architectures", [architecture])) != [architecture]:
        raise ValueError(f"architectures = {got!r}, want {[architecture]!r}; save the causal language model")
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method") if isinstance(raw["quantization_config"], dict) else "?"
        raise ValueError(
            f"quantization_config: the checkpoint is already quantised ({method}), want float weights; "
            "use the original checkpoint and quantize it here"
        )
    for key, (wanted, fix) in _ONLY.items():
        if (got := raw.pop(key, wanted)) != wanted:
            raise ValueError(f"{key} = {got!r}, want {wanted!r}; {fix}")
    theta, scaling = _rope(raw)
    dim, num_heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    if qwen := kind == "qwen3":
        _refuse_windows(raw)
    elif "head_dim" not in raw and dim % num_heads:
        raise ValueError(
            f"hidden_size = {dim} is not a multiple of num_attention_heads = {num_heads}; correct one of them"
        )
    num_kv_heads = _integer(raw, "num_key_value_heads", None if qwen else num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = {num_kv_heads}; "
            "correct one of them"
        )
    cfg = Config(
        vocab=_integer(raw, "vocab_size"),
        dim=dim,
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_integer(raw, "head_dim", None if qwen else dim // num_heads),
        hidden=_integer(raw, "intermediate_size"),
        norm_eps=_number(raw, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=_integer(raw, "max_position_embeddings"),
        tied=_boolean(raw, "tie_word_embeddings"),
        attention_bias=_boolean(raw, "attention_bias"),
        mlp_bias=_boolean(raw, "mlp_bias"),
        qk_norm=qwen,
    )
    if unknown := sorted(raw.keys() - _READ - _HARMLESS):
        raise ValueError(
            f"{unknown[0]} = {raw[unknown[0]]!r} is not a key of a {name} config that is known here, and it may "
            "change the forward pass; remove it if it does not"
        )
    return cfg


def to_hf(cfg: Config) -> dict[str, Any]:
    """The ``config.json`` of ``cfg``, for transformers 4 and 5; ``from_hf`` of it is ``cfg``."""
    scaling: dict[str, Any] | None = None
    if (given := cfg.rope_scaling) is not None:
        values = (given.factor, given.low_freq_factor, given.high_freq_factor, given.original_max_position)
        scaling = {"rope_type": given.kind, **dict(zip(ROPE_KINDS[given.kind], values, strict=False))}
    kind = "qwen3" if cfg.qk_norm else "llama"
    own = {"use_sliding_window": False} if cfg.qk_norm else {"mlp_bias": cfg.mlp_bias}
    return {
        "architectures": [KINDS[kind][0]],
        "model_type": kind,
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.dim,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": cfg.rope_theta, **(scaling or {"rope_type": "default"})},
        "max_position_embeddings": cfg.max_positions,
        "tie_word_embeddings": cfg.tied,
        "attention_bias": cfg.attention_bias,
        "attention_dropout": 0.0,
        **own,
        "bos_token_id": None,  # absent would mean 1 and 2
        "eos_token_id": None,
    }


_READ = frozenset(to_hf(Config(2, 2, 1, 1, 1, 2, 2)))


def _refuse_windows(raw: dict[str, Any]) -> None:
    """Take what Qwen3 says of sliding windows out of ``raw``; raises ValueError when they are in use."""
    if (got := raw.pop("use_sliding_window", False)) is not False:
        raise ValueError(f"use_sliding_window = {got!r}, want False; sliding windows are not implemented")
    full = ["full_attention"] * _integer(raw, "num_hidden_layers")
    if (got := raw.pop("layer_types", full)) != full:
        raise ValueError(f"layer_types = {got!r}, want 'full_attention' for each of {len(full)} layers; correct it")
    for unused in ("sliding_window", "max_window_layers"):
        raw.pop(unused, None)


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from either spelling, or from both where they agree."""
    old = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
    old, new = _rope_table("rope_scaling", raw, old), _rope_table("rope_parameters", raw, {})
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            raise ValueError(
                f"rope_parameters.{key} = {new[key]!r}, but the older spelling says {old[key]!r}; remove one of them"
            )
    both = old | new
    kind, theta = both.pop("rope_type", "default"), _number(both, "rope_theta", 10000.0)
    if (got := both.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"rope_parameters.partial_rotary_factor = {got}, want 1.0; whole heads are rotated here")
    if kind not in ("default", *ROPE_KINDS):
        raise ValueError(
            f"rope_parameters.rope_type = {kind!r}, want one of default, {', '.join(ROPE_KINDS)}; "
            "other scalings are not implemented"
        )
    wanted = ROPE_KINDS.get(kind, ())
    if unknown := sorted(both.keys() - {"rope_theta", *wanted}):
        raise ValueError(
            f"rope_parameters.{unknown[0]} = {both[unknown[0]]!r} is unknown for rope type {kind!r}; remove it"
        )
    values = [(_integer if key == "original_max_position_embeddings" else _number)(both, key) for key in wanted]
    return theta, RopeScaling(kind, *values) if values else None  # type: ignore[arg-type]


def _rope_table(key: str, raw: dict[str, Any], start: dict[str, Any]) -> dict[str, Any]:
    table = raw.get(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"{key} = {table!r}, want a table of options")
    table = {name: item for name, item in table.items() if item is not None}
    if (old := table.pop("type", None)) is not None:  # the name of rope_type before transformers 4.45
        if table.setdefault("rope_type", old) != old:
            raise ValueError(f"{key}: type = {old!r}, but rope_type = {table['rope_type']!r}; remove one of them")
    return start | table


def _get(raw: dict[str, Any], key: str, default: Any) -> Any:
    if (got := raw.get(key, default)) is None:
        raise ValueError(f"{key} is missing; every config wants it, take it from the model's original config.json")
    return got


def _integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    got = _get(raw, key, default)
    if type(got) is not int or got < 1:
        raise ValueError(f"{key} = {got!r}, want a positive integer")
    return got


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    got = _get(raw, key, default)
    if type(got) not in (int, float) or not 0 < got < float("inf"):
        raise ValueError(f"{key} = {got!r}, want a positive number")
    return float(got)


def _boolean(raw: dict[str, Any], key: str) -> bool:
    got = raw.get(key, False)
    if type(got) is not bool:
        raise ValueError(f"{key} = {got!r}, want true or false")
    return got
