"""The keys of the rotary embedding in ``config.json``, read as a base and a RopeScaling, and written from them.

transformers 4 spells them ``rope_theta`` and ``rope_scaling``, transformers 5 ``rope_parameters``. Both are read, also
together if they agree. Gemma 3 has a table for each kind of layer; the one of layers with a window holds a base alone.
"""

import sys
from functools import partial
from typing import Any

from ..config import RopeScaling
from . import keys

ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}
ORIGINAL = "original_max_position_embeddings"

GPT_OSS = {  # of a config without any
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, ORIGINAL: 4096,
}  # fmt: skip


def _divisors(raw: dict[str, Any], key: str, default: Any = None) -> tuple[float, ...]:
    is_number = lambda x: type(x) in (int, float) and 0 < x <= sys.float_info.max
    valid = lambda got: isinstance(got, list) and 0 < len(got) <= 4096 and all(map(is_number, got))
    return tuple(float(x) for x in keys.read("a list of positive numbers", valid, raw, key, default))


_TRUE = partial(keys.read, "true or false", lambda got: type(got) is bool, default=True)
# Option -> field of RopeScaling, and its reader.
_OPTIONS: dict[str, tuple[str, keys.Reader]] = {
    "factor": ("factor", keys.number), "low_freq_factor": ("low_freq_factor", keys.number),
    "high_freq_factor": ("high_freq_factor", keys.number), ORIGINAL: ("original_max_position", keys.integer),
    "attention_factor": ("attention_factor", keys.number), "beta_fast": ("beta_fast", keys.number),
    "beta_slow": ("beta_slow", keys.number), "truncate": ("truncate", _TRUE), "mscale": ("mscale", keys.number),
    "mscale_all_dim": ("mscale_all_dim", keys.number), "short_factor": ("short_factor", _divisors),
    "long_factor": ("long_factor", _divisors),
}  # fmt: skip
# Rope type -> the options that it wants, and those that it may have.
OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", ORIGINAL),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor", ORIGINAL)),
}


def pop(raw: dict[str, Any], theta: float, kinds: tuple[str, ...], max_positions: int, layered: bool) -> dict[str, Any]:
    """Remove the keys from ``raw`` and return the fields of a Config: base, scaling, base with a window, rotated part.

    ``theta`` is the base if there is none, ``kinds`` are the rope types of the family. ``layered`` families have a
    table for each kind of layer. The part is a fraction, under "partial". Raises ValueError for anything else.
    """
    out: dict[str, Any] = {}
    new = _table("rope_parameters", raw)
    if layered:
        local = raw.pop("rope_local_base_freq", None)
        if new:
            if unknown := sorted(new.keys() - {"full_attention", "sliding_attention"}):
                raise ValueError(f"rope_parameters.{unknown[0]} is unknown; want full_attention and sliding_attention")
            inner = _table("sliding_attention", new)
            keys.refuse_others(inner, "rope_parameters.sliding_attention.rope_type", "default", "remove the scaling")
            local = _agreed("sliding_attention.rope_theta", inner.pop("rope_theta", None), local)
            _refuse_rest(inner, "sliding_attention")
            new = _table("full_attention", new)
        out["window_rope_theta"] = keys.number({"rope_local_base_freq": local or 10000.0}, "rope_local_base_freq")
    old = _table("rope_scaling", raw)
    for key in ("rope_theta", "partial_rotary_factor", ORIGINAL):
        if key in raw:
            given = {key: raw[key]}
            old = given | old if key == "rope_theta" else old | given
            raw.pop(key)
    for key in old.keys() & new.keys():
        _agreed(key, new[key], old[key])
    both = old | new
    out["partial"] = keys.number(both, "partial_rotary_factor", 1.0)
    out["rope_theta"] = keys.number(both, "rope_theta", theta)
    kind = both.pop("rope_type", "default")
    both = {key: item for key, item in both.items() if key not in ("partial_rotary_factor", "rope_theta")}
    if kind in ("su", "yarn") and kinds == ("longrope",):
        kind = "longrope"  # the former names in configs of Phi
    if kind not in ("default", *kinds):
        wanted = f"want one of default, {', '.join(kinds)}"
        raise ValueError(f"rope_parameters.rope_type = {kind!r:.80}, {wanted}; other scalings are not implemented")
    if kind == "default":
        both.pop(ORIGINAL, None)  # which Phi states without a scaling
        _refuse_rest(both, kind)
        return out
    wanted, optional = OPTIONS[kind]
    _refuse_rest({key: item for key, item in both.items() if key not in wanted + optional}, kind)
    if kind == "longrope" and "factor" not in both:
        both["factor"] = max_positions / keys.integer(both, ORIGINAL, max_positions)
    fields = {}
    for key in (*wanted, *(key for key in optional if key in both)):
        name, reader = _OPTIONS[key]
        fields[name] = reader(both, key)
    out["rope_scaling"] = RopeScaling(kind, **fields)
    return out


def write(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the table of a base and a scaling in the newer spelling."""
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling is None:
        return out
    out["rope_type"] = scaling.kind
    wanted, optional = OPTIONS[scaling.kind]
    for key in wanted + optional:
        got = getattr(scaling, _OPTIONS[key][0])
        if got is not None:
            out[key] = list(got) if isinstance(got, tuple) else got
    return out


def _agreed(key: str, new: Any, old: Any) -> Any:
    if new is not None and old is not None and new != old:
        fault = f"but the older spelling says {old!r:.80}"
        raise ValueError(f"rope_parameters.{key} = {new!r:.80}, {fault}; remove one of them")
    return new if old is None else old


def _refuse_rest(table: dict[str, Any], kind: str) -> None:
    for key, got in sorted(table.items()):
        raise ValueError(f"rope_parameters.{key} = {got!r:.80} is unknown for rope type {kind!r}; remove it")


def _table(key: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Remove the table at ``key`` and return it, with 'type' under its newer name 'rope_type'."""
    table = raw.pop(key, None) or {}
    if not isinstance(table, dict):
        raise ValueError(f"{key} = {table!r:.80}, want a table of options")
    table = {name: item for name, item in table.items() if item is not None}
    if (old := table.pop("type", None)) is not None:  # the name of rope_type before transformers 4.45
        if table.setdefault("rope_type", old) != old:
            raise ValueError(f"{key}: type = {old!r}, but rope_type = {table['rope_type']!r}; remove one of them")
    return table
