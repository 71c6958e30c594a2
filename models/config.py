"""The configuration of a decoder: a frozen, hashable value, so that a captured step or a file can hold it.

``models.hf_config`` converts it from and to the ``config.json`` of a Hugging Face folder.
"""

import dataclasses

from fquant import tree

ROPE_KINDS = ("linear", "llama3")


@tree.value
@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies for long contexts.

    ``linear`` divides every frequency by ``factor``. ``llama3`` (Llama 3.1) divides those of wavelengths above
    ``original_max_position / low_freq_factor``, keeps those below the one of ``high_freq_factor``, and blends between.
    """

    kind: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position: int | None = None

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
        if not self.factor > 0:
            raise ValueError(f"rope scaling: factor = {self.factor} must be positive")


@tree.value
@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a Llama, or with ``qk_norm`` of a Qwen3. Raises ValueError for sizes that do not fit together."""

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
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # normalise the queries and keys of every head

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden", "max_positions"):
            if (got := getattr(self, name)) < 1:
                raise ValueError(f"{name} = {got}, want a positive integer")
        if self.num_heads % self.num_kv_heads:
            fault = f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            raise ValueError(f"{fault}; every key-value head must serve equally many heads")
        if self.dim % self.num_heads and not self.qk_norm:
            fault = f"dim = {self.dim} is not a multiple of num_heads = {self.num_heads}"
            raise ValueError(f"{fault}; LlamaConfig wants it to be, even if head_dim is given")
        if self.mlp_bias and self.qk_norm:
            raise ValueError("mlp_bias = True beside qk_norm = True; a Qwen3 has no MLP biases, set one to False")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary embedding pairs its elements, use an even one")
