"""The model families: each one's keys of ``config.json``, and the switches of a Config that they stand for.

Sources: the configuration and modelling files of transformers 5 for each model type. Defaults are stated only where
they determine the model or published files leave a key out; any other missing key is an error.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..config import ROPE_KINDS, Config
from . import keys
from .keys import Reader, boolean, integer, number, refuse_others

FULL, SLIDING = "full_attention", "sliding_attention"
Windows = tuple[int | None, tuple[int, ...]]  # the window, and the layers without it


@dataclass(frozen=True)
class Family:
    """A model type of transformers.

    architecture  the class that computes logits.
    name          the name in messages.
    fixed         fields of Config that all its models have.
    keys          its keys beside ``keys.KEYS``: field of Config, and reader.
    defaults      values of absent keys.
    nullable      keys of which null means "none", with the value of an absent key.
    windows       removes the keys of sliding windows from a config, given ``sliding_window``.
    write         returns the keys that a Config has beside ``keys`` and those of rope.
    only          keys with one value beside ``keys.ONLY``, and the fix.
    harmless      keys without effect beside ``keys.HARMLESS``.
    rope          rope types; theta is the base of a config without one; layered: a table for each kind of layer.
    """

    architecture: str
    name: str
    fixed: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, tuple[str, Reader]] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    nullable: dict[str, Any] = field(default_factory=dict)
    windows: Callable[[dict[str, Any], Any], Windows] = lambda raw, window: (None, ())
    write: Callable[[Config], dict[str, Any]] = lambda cfg: {}
    only: dict[str, tuple[Any, str]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    rope: tuple[str, ...] = ROPE_KINDS
    theta: float = 10000.0
    layered: bool = False


def _window(raw: dict[str, Any], window: Any) -> int | None:
    return None if window is None else integer({"sliding_window": window}, "sliding_window")


def _everywhere(raw: dict[str, Any], window: Any) -> Windows:
    return _window(raw, window), ()


def _needed_windows(raw: dict[str, Any], window: Any, is_full: Callable[[int], bool]) -> Windows:
    found, full = _by_layer(raw, 1 if window is None else window, is_full)
    if window is None and found is not None:
        raise ValueError(f"sliding_window = null, want a number for the layers with {SLIDING!r}; state it")
    return found, full


def _by_layer(raw: dict[str, Any], window: Any, is_full: Callable[[int], bool]) -> Windows:
    """Read ``layer_types`` or, if it is absent, ask ``is_full`` for every layer."""
    count = keys.layers(raw, "num_hidden_layers")
    kinds = raw.pop("layer_types", [FULL if is_full(i) else SLIDING for i in range(count)])
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise ValueError(f"layer_types = {kinds!r:.200}, want {FULL!r} or {SLIDING!r} for each of {count} layers")
    found = _window(raw, window)
    full = tuple(i for i, kind in enumerate(kinds) if kind == FULL)
    return (None, ()) if found is None or len(full) == count else (found, full)


def _qwen_windows(raw: dict[str, Any], window: Any) -> Windows:
    """Read windows that are off by default, and otherwise begin at layer ``max_window_layers``."""
    used, first = boolean(raw, "use_sliding_window"), raw.pop("max_window_layers", 28)
    raw.pop("use_sliding_window", None)
    if used:
        if type(first) is not int or first < 0:
            raise ValueError(f"max_window_layers = {first!r:.80}, want an integer of at least 0")
        return _by_layer(raw, window, lambda i: i < first)
    full = [FULL] * keys.layers(raw, "num_hidden_layers")
    refuse_others(raw, "layer_types", full, "set use_sliding_window to true, if windows are meant")
    return None, ()


def _gemma3_windows(raw: dict[str, Any], window: Any) -> Windows:
    raw.pop("_sliding_window_pattern", None)
    pattern = integer(raw, "sliding_window_pattern", 6)
    raw.pop("sliding_window_pattern", None)
    return _needed_windows(raw, window, lambda i: (i + 1) % pattern == 0)


def _layer_types(cfg: Config) -> list[str]:
    return [SLIDING if cfg.window_of(i) else FULL for i in range(cfg.num_layers)]


def _write_qwen(cfg: Config) -> dict[str, Any]:
    if cfg.window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": cfg.window, "layer_types": _layer_types(cfg)}


def _scalar(scale: float) -> float:
    """Return the number whose inverse root is ``scale``, an integer if one is."""
    near = round(scale**-2)
    return near if near and near**-0.5 == scale else scale**-2


def _write_gemma(cfg: Config) -> dict[str, Any]:
    scale = cfg.head_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
    return {
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": _scalar(scale),
        "sliding_window": cfg.window or 4096, "layer_types": _layer_types(cfg),
        "final_logit_softcapping": cfg.final_cap, "attn_logit_softcapping": cfg.attention_cap,
    }  # fmt: skip


def _moe_windows(raw: dict[str, Any], window: Any) -> Windows:
    """Read a window that is off by default, and otherwise that of all layers."""
    used = boolean(raw, "use_sliding_window")
    raw.pop("use_sliding_window", None)
    return (_window(raw, window) if used else None), ()


def _dense_layers(raw: dict[str, Any], key: str) -> tuple[int, ...]:
    """Return the layers without experts: those listed, and those between the sparse steps."""
    count, step = keys.layers(raw, "num_hidden_layers"), integer(raw, "decoder_sparse_step", 1)
    is_index = lambda i: type(i) is int and 0 <= i < count
    listed = keys.read(
        f"a list of layers from 0 to {count - 1}",
        lambda got: isinstance(got, list) and all(map(is_index, got)),
        raw,
        key,
    )
    return tuple(i for i in range(count) if i in listed or (i + 1) % step)


def _write_qwen3_moe(cfg: Config) -> dict[str, Any]:
    window = {"sliding_window": cfg.window} if cfg.window else {}
    return window | {
        "use_sliding_window": cfg.window is not None, "norm_topk_prob": cfg.routing == "renormalised",
        "mlp_only_layers": list(cfg.dense_layers), "decoder_sparse_step": 1,
    }  # fmt: skip


_GEMMA_KEYS: dict[str, tuple[str, Reader]] = {
    "attention_bias": ("attention_bias", boolean),
    "query_pre_attn_scalar": ("attention_scale", lambda raw, key: number(raw, key) ** -0.5),
}
_GEMMA: dict[str, Any] = {
    "activation": "gelu_tanh", "wide_norm": True, "norm_plus_one": True, "post_norms": True, "scaled_embedding": True,
}  # fmt: skip
_GEMMA_ONLY: dict[str, tuple[Any, str]] = {
    "hidden_activation": ("gelu_pytorch_tanh", "other activations are not implemented"),
    "use_bidirectional_attention": (False, "attention is causal here"),
}
_SILU: dict[str, tuple[Any, str]] = {"hidden_act": ("silu", "use a checkpoint whose MLP is SwiGLU")}
_WHOLE = "use a checkpoint without it"
_LOSS = "add models.experts.load_balancing_loss to the loss instead"
_MOE_ONLY: dict[str, tuple[Any, str]] = {"output_router_logits": (False, _LOSS)}
_MOE_KEYS: dict[str, tuple[str, Reader]] = {
    "num_local_experts": ("num_experts", integer), "num_experts_per_tok": ("experts_per_token", integer),
}  # fmt: skip
_GPT_OSS_KEYS: dict[str, tuple[str, Reader]] = {
    "attention_bias": ("attention_bias", boolean),
    "swiglu_limit": ("swiglu_limit", number), "swiglu_alpha": ("swiglu_alpha", number),
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", "Llama", only=_SILU,
        keys={"attention_bias": ("attention_bias", boolean), "mlp_bias": ("mlp_bias", boolean)},
    ),
    "mistral": Family(
        "MistralForCausalLM", "Mistral", only=_SILU, nullable={"sliding_window": 4096}, windows=_everywhere,
        defaults={"num_key_value_heads": 8}, write=lambda cfg: {"sliding_window": cfg.window},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", "Qwen2", fixed={"qkv_bias": True}, only=_SILU, harmless=frozenset({"attention_bias"}),
        nullable={"sliding_window": 4096}, windows=_qwen_windows, write=_write_qwen,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", "Qwen3", fixed={"qk_norm": True}, only=_SILU,
        keys={"attention_bias": ("attention_bias", boolean)},
        nullable={"sliding_window": 4096}, windows=_qwen_windows, write=_write_qwen,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", "Gemma 2", fixed=_GEMMA, keys=_GEMMA_KEYS, only=_GEMMA_ONLY,
        harmless=frozenset({"hidden_act", "sliding_window_size"}),
        defaults={"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256},
        nullable={"sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        windows=lambda raw, window: _needed_windows(raw, window, lambda i: i % 2 == 1), write=_write_gemma,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", "Gemma 3", fixed=_GEMMA | {"qk_norm": True}, keys=_GEMMA_KEYS, only=_GEMMA_ONLY,
        harmless=frozenset({"hidden_act", "sliding_window_size", "attn_logit_softcapping"}),
        defaults={"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256},
        nullable={"sliding_window": 4096, "final_logit_softcapping": None}, windows=_gemma3_windows,
        write=_write_gemma, theta=1e6, layered=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM", "Phi-3", fixed={"fused": True}, windows=_everywhere, nullable={"sliding_window": None},
        only=_SILU | {"resid_pdrop": (0.0, _WHOLE), "embd_pdrop": (0.0, _WHOLE), "attention_bias": (False, _WHOLE)},
        write=lambda cfg: {"sliding_window": cfg.window}, rope=("longrope",),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", "Mixtral", fixed={"routing": "renormalised_wide"}, keys=_MOE_KEYS, theta=1e6,
        only=_SILU | _MOE_ONLY | {"router_jitter_noise": (0.0, "set it to 0.0: no noise is added here")},
        nullable={"sliding_window": None}, windows=_everywhere, defaults={"num_key_value_heads": 8},
        harmless=frozenset({"router_aux_loss_coef"}), write=lambda cfg: {"sliding_window": cfg.window},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "Qwen3-MoE", fixed={"qk_norm": True}, only=_SILU | _MOE_ONLY,
        keys={
            "num_experts": ("num_experts", integer), "num_experts_per_tok": ("experts_per_token", integer),
            "attention_bias": ("attention_bias", boolean), "moe_intermediate_size": ("expert_hidden", integer),
            "norm_topk_prob": ("routing", lambda raw, key: "renormalised" if boolean(raw, key) else "softmax"),
            "mlp_only_layers": ("dense_layers", _dense_layers),
        },
        defaults={"mlp_only_layers": []}, nullable={"sliding_window": 4096}, windows=_moe_windows,
        harmless=frozenset({"router_aux_loss_coef", "max_window_layers", "decoder_sparse_step"}),
        write=_write_qwen3_moe,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", "gpt-oss", keys=_MOE_KEYS | _GPT_OSS_KEYS, only=_MOE_ONLY, theta=150000.0,
        fixed={
            "sinks": True, "wide_norm": True, "interleaved": True, "expert_bias": True, "routing": "softmax_of_chosen",
        },
        defaults={
            "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True,
            "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
        },
        nullable={"sliding_window": 128},
        windows=lambda raw, window: _needed_windows(raw, window, lambda i: i % 2 == 1),
        write=lambda cfg: {"sliding_window": cfg.window, "layer_types": _layer_types(cfg)},
        harmless=frozenset({"router_aux_loss_coef", "hidden_act", "initial_context_length", "experts_per_token"}),
    ),
}  # fmt: skip
NEED_HEADS = (
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "qwen3_moe",
)  # whose classes assume another number of key-value heads
NEED_HEAD_DIM = ("qwen3",)
