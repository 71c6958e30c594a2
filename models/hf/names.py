"""The names of modules and tensors in Hugging Face folders, by our paths."""

from ..config import Config

# Our path -> the name of Hugging Face's module. A tensor's name is its module's, then ``.weight`` or ``.bias``.
MODEL = {"embed": "model.embed_tokens", "final.norm": "model.norm", "final.head": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj",
}  # fmt: skip
EXPERTS = {  # of a layer with experts, in the memory of transformers; the first two are parameters, not modules
    "gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj", "router": "mlp.gate",
}  # fmt: skip
BIASED_ROUTER = "mlp.router"
POST_NORMS = {  # of a layer that also normalises the results of attention and MLP
    "mlp_norm": "pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def module_name(path: str, cfg: Config) -> str:
    """Name the module that holds the weight at ``path``: "layers.0.q" -> "model.layers.0.self_attn.q_proj".

    Families differ in the names of norms and experts: Gemma's ``post_attention_layernorm`` is not Llama's. A weight of
    experts is a parameter of its own, and its name is returned. PEFT has one layout of its adapters, also if
    transformers holds the parameter as [experts in out]. Raises ValueError for a path that is no weight of a decoder.
    """
    layer = _layer(cfg)
    if path in MODEL:
        return MODEL[path]
    match path.split("."):
        case ["layers", n, field] if n.isdecimal() and cfg.has_experts(int(n)) and field in EXPERTS:
            name = BIASED_ROUTER if field == "router" and cfg.expert_bias else EXPERTS[field]
            return f"model.layers.{n}.{name}"
        case ["layers", n, field] if n.isdecimal() and field in layer:
            return f"model.layers.{n}.{layer[field]}"
    raise ValueError(f"{path!r} is no weight of a decoder; want one of {', '.join(MODEL)}, layers.N.{'|'.join(layer)}")


def path_of(module_name: str, cfg: Config) -> str | None:
    """Invert :func:`module_name`; None for a module without a weight of ours."""
    for path, name in MODEL.items():
        if name == module_name:
            return path
    match module_name.split(".", 3):
        case ["model", "layers", n, field] if n.isdecimal():
            known = *_layer(cfg).items(), *EXPERTS.items(), ("router", BIASED_ROUTER)
            return next((f"layers.{n}.{path}" for path, name in known if name == field), None)
    return None


def tied_modules(cfg: Config) -> dict[str, str]:
    """Return the module of the head by that of the table that it shares, for ``fquant.io.peft``; {} without one."""
    return {MODEL["embed"]: MODEL["final.head"]} if cfg.tied else {}


def tensor_name(path: str, cfg: Config) -> str:
    """Name the tensor at ``path`` in a file: "layers.0.q_bias" -> "model.layers.0.self_attn.q_proj.bias".

    Weights of experts have their name in the memory of transformers; ``stacks`` has those in files.
    """
    weight = path.removesuffix("_bias")
    if weight.endswith(".sinks") and weight.split(".")[0] == "layers":
        return f"model.{weight.removesuffix('sinks')}self_attn.sinks"
    name = module_name(weight, cfg)
    if ".mlp.experts." in name:
        return name if weight == path else f"{name}_bias"
    return name + (".weight" if weight == path else ".bias")


def _layer(cfg: Config) -> dict[str, str]:
    return LAYER | POST_NORMS if cfg.post_norms else LAYER
