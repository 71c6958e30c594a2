"""The named dims of a decoder's parameters, from which sharding rules and shapes follow."""

from .config import Config


def dims(cfg: Config) -> dict[str, dict[str, str]]:
    """Return the named dims of every tensor: block path -> path inside the block -> names, e.g. ``"heads embed"``.

    A block is the unit of one ``comm.load``. The names are vocab, embed, heads, kv_heads, head, ffn, qkv, gate_up,
    num_heads, experts, expert_ffn and expert_gate_up.
    """
    final = {"norm": "embed"} if cfg.tied else {"norm": "embed", "head": "vocab embed"}
    layers = {f"layers.{i}": _layer_dims(cfg, cfg.has_experts(i)) for i in range(cfg.num_layers)}
    return {"embed": {"": "vocab embed"}, **layers, "final": final}


def _layer_dims(cfg: Config, has_experts: bool) -> dict[str, str]:
    layer = {"attn_norm": "embed", "q": "heads embed", "k": "kv_heads embed", "v": "kv_heads embed", "o": "embed heads"}
    layer |= {"mlp_norm": "embed", "gate": "ffn embed", "up": "ffn embed", "down": "embed ffn"}
    if cfg.fused:
        layer = {"attn_norm": "embed", "o": "embed heads", "mlp_norm": "embed", "down": "embed ffn"}
        layer |= {"qkv": "qkv embed", "gate_up": "gate_up embed"}
    if cfg.attention_bias or cfg.qkv_bias:
        layer |= {"q_bias": "heads", "k_bias": "kv_heads", "v_bias": "kv_heads"}
    if cfg.attention_bias:
        layer |= {"o_bias": "embed"}
    if cfg.mlp_bias:
        layer |= {"gate_bias": "ffn", "up_bias": "ffn", "down_bias": "embed"}
    if cfg.qk_norm:
        layer |= {"q_norm": "head", "k_norm": "head"}  # one for all heads
    if cfg.post_norms:
        layer |= {"attn_post_norm": "embed", "mlp_post_norm": "embed"}
    if cfg.sinks:
        layer |= {"sinks": "num_heads"}
    if has_experts:
        layer |= {"router": "experts embed", "gate_up": "experts expert_gate_up embed"}
        layer |= {"down": "experts embed expert_ffn"}
        layer = {name: names for name, names in layer.items() if name not in ("gate", "up")}
    if has_experts and cfg.expert_bias:
        layer |= {"router_bias": "experts", "gate_up_bias": "experts expert_gate_up", "down_bias": "experts embed"}
    return layer
