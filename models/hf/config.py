"""The ``config.json`` of a Hugging Face folder, read as a Config and written from one.

:func:`from_hf` is strict: a key is understood, known to be without effect on the forward pass, or an error. An unknown
option could change the result, and a refused file is better than a wrong logit. An absent or null key has the default
of its class in transformers if that determines the model, and is otherwise an error. ``families.py`` has the table of
model types, ``keys.py`` and ``rope_keys.py`` those of keys.

:func:`to_hf` writes the older and the newer spelling of the rotary embedding, so that transformers 4 and 5 load it.
"""

from typing import Any

from fquant.io import quantized

from ..config import Config
from . import rope_keys
from .families import FAMILIES, NEED_HEAD_DIM, NEED_HEADS
from .keys import HARMLESS, KEYS, ONLY, integer, number, refuse_others


def from_hf(raw: dict[str, Any]) -> Config:
    """Convert a parsed ``config.json``; raise ValueError with the key, its value, the wanted value and a fix."""
    given = dict(raw)
    if not isinstance(kind := given.pop("model_type", None), str) or kind not in FAMILIES:
        wanted = " or ".join(map(repr, FAMILIES))
        raise ValueError(f"model_type = {kind!r:.80}, want {wanted}; others are not implemented")
    family = FAMILIES[kind]
    nullable = {key: given.pop(key, default) for key, default in family.nullable.items()}
    given = {key: item for key, item in given.items() if item is not None}
    refuse_others(given, "architectures", [family.architecture], "save the causal language model")
    if "quantization_config" in given:
        quantized.method(given.pop("quantization_config"))  # which loading reads; here it is only checked
    for key, (wanted, fix) in (ONLY | family.only).items():
        refuse_others(given, key, wanted, fix)
    fields: dict[str, Any] = dict(family.fixed)
    fields["window"], fields["full_layers"] = family.windows(given, nullable.pop("sliding_window", None))
    for key, name in (("final_logit_softcapping", "final_cap"), ("attn_logit_softcapping", "attention_cap")):
        if (cap := nullable.pop(key, None)) is not None:
            fields[name] = number({key: cap}, key)
    dim, heads = integer(given, "hidden_size"), integer(given, "num_attention_heads")
    assumed = {} if kind in NEED_HEADS else {"num_key_value_heads": heads}
    defaults = assumed | family.defaults
    if kind in ("mistral", "mixtral") and raw.get("num_key_value_heads", 8) is None:
        defaults |= assumed
    if "head_dim" not in given | defaults and kind not in NEED_HEAD_DIM:
        if dim % heads:
            fault = f"hidden_size = {dim} is not a multiple of num_attention_heads = {heads}"
            raise ValueError(f"{fault}; correct one of them")
        defaults |= {"head_dim": dim // heads}
    if kind == "gpt_oss" and not given.keys() & {"rope_scaling", "rope_parameters"}:
        given["rope_parameters"] = rope_keys.GPT_OSS
    if kind == "qwen3_moe":  # transformers 5 writes the other name
        _rename(given, "num_local_experts", "num_experts")
    own = KEYS | family.keys
    positions = integer(given, "max_position_embeddings")
    if kind == "phi3":
        given.setdefault(rope_keys.ORIGINAL, 4096)  # as in its class, even if rope_scaling has another
    fields |= rope_keys.pop(given, family.theta, family.rope, positions, family.layered)
    values = defaults | given
    fields |= {field: reader(values, key) for key, (field, reader) in own.items()}
    if heads % (kv := fields["num_kv_heads"]):
        fault = f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv}"
        raise ValueError(f"{fault}; correct one of them")
    _check_heads(kind, dim, heads)
    rotated = int(fields["head_dim"] * fields.pop("partial"))
    if rotated != fields["head_dim"]:
        if kind != "phi3":
            got = f"rotates {rotated} of head_dim = {fields['head_dim']}"
            raise ValueError(f"partial_rotary_factor {got}; a {family.name} rotates the whole head, use 1.0")
        fields["rotary_dim"] = rotated
    if fields.get("attention_scale") == fields["head_dim"] ** -0.5:
        fields["attention_scale"] = None
    if unknown := sorted(given.keys() - own - HARMLESS - family.harmless):
        fault = f"is not a key of a {family.name} config that is known here, and it may change the forward pass"
        raise ValueError(f"{unknown[0]:.80} = {given[unknown[0]]!r:.80} {fault}; remove it if it does not")
    return Config(**fields, family=kind)


def to_hf(cfg: Config) -> dict[str, Any]:
    """Return the ``config.json`` of ``cfg`` for transformers 4 and 5; :func:`from_hf` inverts it.

    Raises ValueError for switches that the config's family does not have.
    """
    if cfg.family not in FAMILIES:
        raise ValueError(f"family = {cfg.family!r}, want one of {', '.join(FAMILIES)}")
    family = FAMILIES[cfg.family]
    keys = {key: getattr(cfg, field) for key, (field, _) in (KEYS | family.keys).items()}
    table = rope_keys.write(cfg.rope_theta, cfg.rope_scaling)
    old = {key: item for key, item in table.items() if key != "rope_theta"} if cfg.rope_scaling else None
    out = {
        "architectures": [family.architecture], "model_type": cfg.family, **keys, **family.write(cfg),
        "attention_dropout": 0.0, "rope_theta": cfg.rope_theta, "rope_scaling": old,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,  # absent would mean 1, 2 and 32000, say
    }  # fmt: skip
    if "hidden_act" in family.only:
        out["hidden_act"] = "silu"
    if cfg.family == "phi3":
        part = (cfg.rotary_dim or cfg.head_dim) / cfg.head_dim
        original = cfg.rope_scaling.original_max_position if cfg.rope_scaling else None
        out |= {"partial_rotary_factor": part, rope_keys.ORIGINAL: original or cfg.max_positions}
        table["partial_rotary_factor"] = part
    out["rope_parameters"] = table
    if family.layered:
        local = {"rope_type": "default", "rope_theta": cfg.window_rope_theta}
        out["rope_local_base_freq"] = cfg.window_rope_theta
        out["rope_parameters"] = {"full_attention": table, "sliding_attention": local}
    if (got := from_hf(out)) != cfg:
        wrong = next(name for name in cfg.__dataclass_fields__ if getattr(got, name) != getattr(cfg, name))
        fault = f"{wrong} = {getattr(cfg, wrong)!r:.80}, but a {family.name} has {getattr(got, wrong)!r:.80}"
        raise ValueError(f"{fault}; set family to one that has it ({', '.join(FAMILIES)})")
    return out


def _rename(given: dict[str, Any], old: str, new: str) -> None:
    if old in given and given.setdefault(new, given[old]) != given.pop(old):
        raise ValueError(f"{old} and {new} = {given[new]!r:.80} differ; keep the right one")


def _check_heads(kind: str, dim: int, heads: int) -> None:
    if dim % heads and kind in ("llama", "gemma2", "gemma3_text"):
        fault = f"hidden_size = {dim} is not a multiple of num_attention_heads = {heads}"
        raise ValueError(f"{fault}; its class in transformers wants it to be, even if head_dim is given")
