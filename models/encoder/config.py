"""The configuration of an encoder: a frozen, hashable value, as ``models.config`` has for decoders."""

from dataclasses import dataclass

import torch.nn.functional as F

from fquant import tree

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
CLASSIFIERS = ("pooler", "tanh", "relu", "gelu")


@tree.value
@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder and the heads that it has. Raises ValueError for sizes that do not fit together."""

    vocab: int
    dim: int
    num_layers: int
    num_heads: int
    hidden: int  # width of the MLP
    max_positions: int  # rows of the table of positions
    num_types: int = 2  # of tokens; 0: no table of types
    norm_eps: float = 1e-12
    activation: str = "gelu"
    padding: int | None = None  # a token that counts for no position; others count from padding + 1 (RoBERTa)
    pooler: bool = False
    masked_lm: bool = False
    next_sentence: bool = False
    num_labels: int = 0  # of the classification head; 0: none
    tied: bool = True  # the last matrix of masked_lm is the embedding
    head_activation: str = "gelu"  # in masked_lm
    classifier: str = "pooler"  # input of the last matrix of classify: the pooler's, or a layer with this activation
    family: str = "bert"  # the model type in a config.json
    embed_dim: int | None = None  # of the tables of embeddings, and of the head masked_lm; None: dim (ELECTRA)
    discriminator: bool = False  # a head with one logit for each token

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "num_layers", "num_heads", "hidden", "max_positions"):
            if (got := getattr(self, name)) < 1:
                raise ValueError(f"{name} = {got}, want a positive integer")
        for name in ("num_types", "num_labels"):
            if (got := getattr(self, name)) < 0:
                raise ValueError(f"{name} = {got}, want 0 or a positive integer")
        if self.embed_dim is not None and self.embed_dim < 1:
            raise ValueError(f"embed_dim = {self.embed_dim}, want a positive integer or None")
        if self.dim % self.num_heads:
            raise ValueError(f"dim = {self.dim} is not a multiple of num_heads = {self.num_heads}; correct one of them")
        for name, known in (
            ("activation", ACTIVATIONS), ("head_activation", ACTIVATIONS), ("classifier", CLASSIFIERS),
        ):  # fmt: skip
            if (got := getattr(self, name)) not in known:
                raise ValueError(f"{name} = {got!r}, want one of {', '.join(known)}")
        if not self.pooler and (self.next_sentence or (self.num_labels and self.classifier == "pooler")):
            raise ValueError("pooler = False beside a head that reads it; set pooler to True")
        if self.padding is not None and not 0 <= self.padding < self.vocab:
            raise ValueError(f"padding = {self.padding}, want a token below vocab = {self.vocab}, or None")
        if self.longest < 1:
            raise ValueError(f"max_positions = {self.max_positions}, want more than padding + 1; positions begin there")

    @property
    def longest(self) -> int:
        """Return the tokens that a sequence may have."""
        return self.max_positions - (0 if self.padding is None else self.padding + 1)
