"""The configuration of a decoder: a frozen, hashable value, so that a captured step or a file can hold it.

One decoder serves every family; a family is a choice of switches. ``models.hf`` converts a Config from and to the
``config.json`` of a Hugging Face folder, and says which family has which switches.
"""

import dataclasses
import math

from fquant import tree

ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
ACTIVATIONS = ("silu", "gelu_tanh")
ROUTINGS = ("softmax", "renormalised", "renormalised_wide", "softmax_of_chosen")  # see models.experts


@tree.value
@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies for long contexts; ``models.rope`` has the formulas.

    ``linear`` and ``dynamic`` have a factor alone. ``llama3`` also wants ``low_freq_factor``, ``high_freq_factor`` and
    ``original_max_position``. ``yarn`` has the fields up to ``mscale_all_dim``; ``longrope`` has two lists of divisors,
    one for each frequency. ``original_max_position`` is the config's ``max_positions`` by default.
    """

    kind: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position: int | None = None
    attention_factor: float | None = None  # of cosine and sine; None: by the recipe
    beta_fast: float = 32.0  # rotations within the original context from which a frequency is kept
    beta_slow: float = 1.0  # and up to which it is divided
    truncate: bool = True  # the ends of the ramp are whole dims
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind!r} is not supported; want one of default, {', '.join(ROPE_KINDS)}")
        if self.kind == "llama3":
            low, high, length = self.low_freq_factor, self.high_freq_factor, self.original_max_position
            if low is None or high is None or length is None:
                wanted = "low_freq_factor, high_freq_factor and original_max_position"
                raise ValueError(f"rope type 'llama3' wants {wanted}, got {low}, {high} and {length}; give all three")
            if not 0 < low < high:
                raise ValueError(f"rope scaling: low_freq_factor = {low} must be in (0, high_freq_factor = {high})")
        if self.kind == "longrope" and not (self.short_factor and len(self.short_factor) == len(self.long_factor)):
            got = f"{len(self.short_factor)} and {len(self.long_factor)}"
            raise ValueError(f"rope type 'longrope' wants as many of long_factor as of short_factor, got {got}")
        for name in ("factor", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise ValueError(f"rope scaling: {name} = {getattr(self, name)} must be positive")


@tree.value
@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a decoder. Raises ValueError for sizes that do not fit together."""

    vocab: int
    dim: int  # of the residual stream
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int  # width of the MLP
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 2048
    tied: bool = False  # the head is the embedding
    attention_bias: bool = False  # of queries, keys, values and the output
    mlp_bias: bool = False
    qk_norm: bool = False  # normalise the queries and keys of every head
    family: str = "llama"  # the model type in a config.json
    qkv_bias: bool = False  # of queries, keys and values alone
    fused: bool = False  # one weight for queries, keys and values, and one for gate and up
    activation: str = "silu"
    wide_norm: bool = False  # multiply norms by their weight in float32, and round once
    norm_plus_one: bool = False  # norms multiply by one more than their weight
    post_norms: bool = False  # normalise the results of attention and MLP too
    scaled_embedding: bool = False  # multiply embeddings by sqrt(dim), rounded to their dtype
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    attention_cap: float | None = None  # scores are limited to cap * tanh(score / cap)
    final_cap: float | None = None  # the same for logits
    window: int | None = None  # tokens that a token sees, itself included
    full_layers: tuple[int, ...] = ()  # layers without the window
    window_rope_theta: float | None = None  # of layers with the window, which then have no scaling; None: as others
    rotary_dim: int | None = None  # elements of a head that are rotated; None: all
    num_experts: int = 0  # of a layer; 0: one MLP for all tokens
    experts_per_token: int = 0
    expert_hidden: int | None = None  # width of an expert; None: hidden
    dense_layers: tuple[int, ...] = ()  # layers without experts
    routing: str = "renormalised"  # from scores of experts to their weights
    expert_bias: bool = False  # of the router and of experts
    interleaved: bool = False  # rows of an expert's gate and up alternate; else gate comes first
    swiglu_limit: float | None = None  # experts clamp gate and up, and multiply by up + 1
    swiglu_alpha: float = 1.702  # the factor in the sigmoid of such experts
    sinks: bool = False  # one more score for each head, whose value is 0

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden", "max_positions"):
            if (got := getattr(self, name)) < 1:
                raise ValueError(f"{name} = {got}, want a positive integer")
        if self.num_heads % self.num_kv_heads:
            fault = f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            raise ValueError(f"{fault}; every key-value head must serve equally many heads")
        if (rotary := self.rotary_dim or self.head_dim) % 2 or not 0 < rotary <= self.head_dim:
            fault = "is odd" if rotary == self.head_dim else f"of head_dim = {self.head_dim} are rotated"
            raise ValueError(f"head_dim = {rotary} {fault}; rotary embedding pairs its elements, use an even one")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            wanted = f"want 1 to num_experts = {self.num_experts}"
            raise ValueError(f"experts_per_token = {self.experts_per_token}, {wanted}")
        if self.num_experts and self.fused:
            raise ValueError("fused = True beside experts; no known family has both, set it to False")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing = {self.routing!r}, want one of {', '.join(ROUTINGS)}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation = {self.activation!r}, want one of {', '.join(ACTIVATIONS)}")
        for name in ("attention_scale", "attention_cap", "final_cap", "window", "window_rope_theta", "swiglu_limit"):
            if (got := getattr(self, name)) is not None and not 0 < got < math.inf:
                raise ValueError(f"{name} = {got}, want a positive number or None")
        if self.attention_bias and self.qkv_bias:
            raise ValueError("attention_bias = True beside qkv_bias = True; the first includes the second, set one")
        if self.fused and (self.attention_bias or self.qkv_bias or self.mlp_bias):
            raise ValueError("fused = True beside biases; no known family has both, set one to False")
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            if len(self.rope_scaling.short_factor) != rotary // 2:
                got = f"{len(self.rope_scaling.short_factor)} numbers of short_factor"
                raise ValueError(f"rope scaling: {got} for {rotary // 2} frequencies; want one for each")

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer by its index; None if it sees all tokens."""
        return None if layer in self.full_layers else self.window

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer, by its index, has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def longest(self) -> float:
        """Return the tokens that a sequence may have: ``max_positions``, or more by a scaling that extends them."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind not in ("dynamic", "yarn", "longrope"):
            return self.max_positions
        if scaling.kind == "dynamic":
            return math.inf
        return max(self.max_positions, math.ceil(scaling.factor * (scaling.original_max_position or 0)))


tree.add_later_fields(Config, "family")
tree.add_later_fields(RopeScaling, "attention_factor")
