"""The names of modules and tensors in folders of encoders, by our paths."""

from ..encoder.config import EncoderConfig
from .config import architecture
from .families import EMBED, FAMILIES, Family


def prefix_of(cfg: EncoderConfig) -> str:
    """Return what the names of the encoder's tensors begin with: nothing in a folder without heads."""
    family = FAMILIES[cfg.family]
    return "" if architecture(cfg) == f"{family.classes}Model" else family.prefix


def module_name(path: str, cfg: EncoderConfig, prefix: str | None = None) -> str:
    """Name the module with the weight at ``path``: "layers.0.q" -> "bert.encoder.layer.0.attention.self.query".

    ``prefix`` is by default that of :func:`prefix_of`. Raises ValueError for a path that is no weight of an encoder.
    """
    family, prefix = FAMILIES[cfg.family], prefix_of(cfg) if prefix is None else prefix
    match path.split("."):
        case ["embed", name] if name in EMBED:
            return prefix + EMBED[name]
        case ["layers", n, name] if n.isdecimal() and name in family.layer:
            return f"{prefix}{family.stack}.{n}.{family.layer[name]}"
        case ["heads", "pooler"]:
            return f"{prefix}pooler.dense"
        case ["heads", name] if name in family.heads:
            return family.heads[name]
    embed, layer, heads = ("|".join(names) for names in (EMBED, family.layer, ("pooler", *family.heads)))
    raise ValueError(f"{path!r} is no weight of an encoder; want embed.{embed}, layers.N.{layer} or heads.{heads}")


def path_of(module: str, cfg: EncoderConfig, prefix: str | None = None) -> str | None:
    """Invert :func:`module_name`; None for a module without a weight of ours."""
    family, prefix = FAMILIES[cfg.family], prefix_of(cfg) if prefix is None else prefix
    paths = [f"embed.{name}" for name in EMBED] + ["heads.pooler", *(f"heads.{name}" for name in family.heads)]
    number, _, rest = module.removeprefix(f"{prefix}{family.stack}.").partition(".")
    if number.isdecimal():
        paths += [f"layers.{number}.{name}" for name, named in family.layer.items() if named == rest]
    return next((path for path in paths if module_name(path, cfg, prefix) == module), None)


def tied_modules(cfg: EncoderConfig, prefix: str | None = None) -> dict[str, str]:
    """Return the head's module by that of the table that it shares, for ``fquant.io.peft``; {} if it shares none."""
    is_shared = cfg.masked_lm and cfg.tied
    return {module_name("embed.tokens", cfg, prefix): FAMILIES[cfg.family].heads["decoder"]} if is_shared else {}


def tensor_name(path: str, cfg: EncoderConfig, prefix: str | None = None) -> str:
    """Name the tensor at ``path`` in a file: "layers.0.q_bias" -> "bert.encoder.layer.0.attention.self.query.bias"."""
    if path == "heads.decoder_bias":
        return FAMILIES[cfg.family].bias
    weight = path.removesuffix("_bias")
    return module_name(weight, cfg, prefix) + (".weight" if weight == path else ".bias")


def modern(name: str) -> str:
    """Return the name of a tensor under which it is written today: a norm had ``gamma`` and ``beta``."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def copies(family: Family) -> dict[str, str]:
    """Map names of tensors that some folders hold twice, of which one is ours, to the path of ours."""
    decoder = family.heads["decoder"]
    found = {f"{decoder}.weight": "embed.tokens", f"{decoder}.bias": "heads.decoder_bias"}
    return {name: path for name, path in found.items() if name != family.bias}
