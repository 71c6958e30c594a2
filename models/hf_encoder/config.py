"""The ``config.json`` of an encoder's folder, read as an EncoderConfig and written from one.

As strict as ``models.hf.config``: a key is understood, known to be without effect, or an error.
"""

from collections.abc import Collection
from typing import Any

from ..encoder.config import EncoderConfig
from ..hf.keys import integer, refuse_others
from .families import ACTIVATIONS, FAMILIES, HARMLESS, ONLY

HEADS = {  # fields of EncoderConfig that say which heads it has, and a weight of each
    "pooler": "pooler", "masked_lm": "transform", "next_sentence": "next_sentence", "num_labels": "classifier",
    "discriminator": "discriminator",
}  # fmt: skip


def from_hf(raw: dict[str, Any], heads: Collection[str] | None = None) -> EncoderConfig:
    """Convert a parsed ``config.json``; raise ValueError with the key, its value, the wanted value and a fix.

    ``heads`` are fields of EncoderConfig that say which heads a file has; None are those of the architecture.
    """
    given = dict(raw)
    if not isinstance(kind := given.pop("model_type", None), str) or kind not in FAMILIES:
        wanted = " or ".join(map(repr, FAMILIES))
        raise ValueError(f"model_type = {kind!r:.80}, want {wanted}; others are not implemented")
    family = FAMILIES[kind]
    fields: dict[str, Any] = {"family": kind, **family.fixed}
    if family.classes.endswith("Roberta"):
        fields["padding"] = padding(given)
    given = {key: item for key, item in given.items() if item is not None}
    found = architecture_heads(kind, given.pop("architectures", None))
    if "quantization_config" in given:
        fault = "the checkpoint is already quantised, want float weights"
        raise ValueError(f"quantization_config: {fault}; use the original checkpoint and quantize it here")
    for key, (wanted, fix) in ONLY.items():
        refuse_others(given, key, wanted, fix)
    values = family.defaults | given
    fields |= {field: reader(values, key) for key, (field, reader) in family.keys.items()}
    labels = num_labels(given)
    if unknown := sorted(given.keys() - family.keys - HARMLESS - {"num_labels"}):
        fault = f"is not a key of a {family.classes} config that is known here, and it may change the forward pass"
        raise ValueError(f"{unknown[0]:.80} = {given[unknown[0]]!r:.80} {fault}; remove it if it does not")
    fields |= {head: labels if head == "num_labels" else True for head in (found if heads is None else heads)}
    if fields.get("num_types") == 0 and family.fixed.get("num_types") != 0:
        raise ValueError("type_vocab_size = 0, want a positive integer")
    if not fields.get("masked_lm"):
        fields["tied"] = True  # which nothing then reads
    if fields.get("embed_dim") == fields["dim"]:
        fields["embed_dim"] = None
    if kind in ("bert", "distilbert"):
        fields["head_activation"] = fields["activation"]
    return EncoderConfig(**fields)


def padding(raw: dict[str, Any]) -> int:
    """Return the token that counts for no position, in a family where it matters."""
    got = raw.pop("pad_token_id", 1)
    if type(got) is not int or got < 0:
        raise ValueError(f"pad_token_id = {got!r:.80}, want a token, because positions count from the next number")
    return got


def num_labels(raw: dict[str, Any]) -> int:
    """Return the number of labels, which is 2 if no key states it."""
    names = raw.get("id2label", None)
    if names is not None and not (isinstance(names, dict) and names):
        raise ValueError(f"id2label = {names!r:.80}, want a table of names by number")
    count = integer(raw, "num_labels", 2 if names is None else len(names))
    if names is not None and count != len(names):
        raise ValueError(f"num_labels = {count}, but id2label names {len(names)}; remove one of them")
    return count


def architecture_heads(kind: str, given: Any) -> tuple[str, ...]:
    """Return the heads of the architecture that a config names; those of the bare encoder if it names none."""
    family = FAMILIES[kind]
    known = {family.classes + name: heads for name, heads in family.architectures.items()}
    given = [family.classes + "Model"] if given is None else given
    if not isinstance(given, list) or len(given) != 1 or given[0] not in list(known):
        fix = "load the encoder alone from it and save that"
        raise ValueError(f"architectures = {given!r:.200}, want one of {', '.join(known)}; {fix}")
    return known[given[0]]


def architecture(cfg: EncoderConfig) -> str:
    """Return the architecture with the heads of ``cfg``; labels first, then as many as one class has."""
    family, present = FAMILIES[cfg.family], {*heads_of(cfg), "pooler"}  # which every class may lack or have besides
    fitting = [(name, heads) for name, heads in family.architectures.items() if present.issuperset(heads)]
    rank = lambda item: ("num_labels" in item[1], len({*item[1]} - {"pooler"}))
    return family.classes + max(fitting, key=rank)[0]


def heads_of(cfg: EncoderConfig) -> tuple[str, ...]:
    """Return the fields that say which heads ``cfg`` has."""
    return tuple(name for name in HEADS if getattr(cfg, name))


def to_hf(cfg: EncoderConfig) -> dict[str, Any]:
    """Return the ``config.json`` of ``cfg``; :func:`from_hf` inverts it, given the heads.

    Raises ValueError for switches that the config's family does not have.
    """
    if cfg.family not in FAMILIES:
        raise ValueError(f"family = {cfg.family!r}, want one of {', '.join(FAMILIES)}")
    family = FAMILIES[cfg.family]
    out: dict[str, Any] = {"architectures": [architecture(cfg)], "model_type": cfg.family}
    out |= {key: getattr(cfg, field) for key, (field, _) in family.keys.items()}
    for key in ("hidden_act", "activation"):
        if key in out:
            out[key] = ACTIVATIONS[cfg.activation][0]
    if "embedding_size" in out:
        out["embedding_size"] = cfg.embed_dim or cfg.dim
    out |= {"pad_token_id": cfg.padding, "bos_token_id": None, "eos_token_id": None}
    if cfg.num_labels:
        names = {str(i): f"LABEL_{i}" for i in range(cfg.num_labels)}
        out |= {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
    if (got := from_hf(out, heads_of(cfg))) != cfg:
        wrong = next(name for name in cfg.__dataclass_fields__ if getattr(got, name) != getattr(cfg, name))
        fault = f"{wrong} = {getattr(cfg, wrong)!r:.80}, but a {family.classes} has {getattr(got, wrong)!r:.80}"
        raise ValueError(f"{fault}; set family to one that has it ({', '.join(FAMILIES)})")
    return out
