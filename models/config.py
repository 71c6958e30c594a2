"""Config: what a decoder is, apart from its weights.

A frozen value. It is static wherever it appears, so a captured step, a fingerprint or a file can hold it.

``from_hf`` reads the ``config.json`` of a Hugging Face folder and is strict: a key is either understood, known to be
without effect on the forward pass, or an error. An option that is not known here could change the result, and a wrong
logit is worse than a refused file. What is absent or null has LlamaConfig's default where that says what the model is
(no biases, no grouping of heads), and is otherwise an error; of a Qwen3 the heads have to be given, since its classes
take others for granted. Both spellings of the rotary embedding are read,
transformers 4's (``rope_theta`` and ``rope_scaling``) and 5's (``rope_parameters``); ``to_hf`` writes both, so that
either version loads it.
"""

from __future__ import annotations

import dataclasses

from fquant import tree

# Rope type -> its options, as Hugging Face names them and in the order of RopeScaling's fields.
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@tree.value
@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides only those whose wavelength exceeds
    ``original_max_position / low_freq_factor``, keeps those below ``original_max_position / high_freq_factor``, and
    blends between (Llama 3.1).
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
                raise ValueError(
                    "rope type 'llama3' wants low_freq_factor, high_freq_factor and original_max_position, "
                    f"got {low}, {high} and {length}; give all three"
                )
            if not 0 < low < high:
                raise ValueError(f"rope scaling: low_freq_factor = {low} must be in (0, high_freq_factor = {high})")
        if not self.factor > 0:
            raise ValueError(f"rope scaling: factor = {self.factor} must be positive")


@tree.value
@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of a Llama, or with ``qk_norm`` of a Qwen3: sizes are counts of elements, ``hidden`` is the width of the
    MLP, ``tied`` shares the embedding with the head, ``qk_norm`` normalises every head's queries and keys. Raises
    ValueError when the heads do not divide."""

    vocab: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 2048
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden", "max_positions"):
            if (got := getattr(self, name)) < 1:
                raise ValueError(f"{name} = {got}, want a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}; "
                "every key-value head must serve equally many heads"
            )
        if self.dim % self.num_heads and not self.qk_norm:
            raise ValueError(
                f"dim = {self.dim} is not a multiple of num_heads = {self.num_heads}; LlamaConfig wants it to be, "
                "even where head_dim is given"
            )
        if self.mlp_bias and self.qk_norm:
            raise ValueError(
                "mlp_bias = True beside qk_norm = True; a Qwen3 has no biases in its MLP, set one to False"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary embedding pairs its elements, use an even one")
