"""The heads of an encoder: a pooled vector, and the logits of tokens, sentences and labels."""

from torch import Tensor

from fquant.communication import LOCAL, Comm
from fquant.packed_linear import linear

from ..norm import layer_norm
from .config import ACTIVATIONS, EncoderConfig
from .params import EncoderParams


def pooled(params: EncoderParams, x: Tensor, cfg: EncoderConfig, comm: Comm = LOCAL) -> Tensor:
    """Compute the pooler's output for the first token: hidden states ``[... t d]`` -> ``[... d]``.

    Raises ValueError if the config has no pooler, as every head does in its own absence.
    """
    _check_head(cfg.pooler, "pooler")
    heads = comm.load(params.heads)
    return linear(x[..., 0, :], heads.pooler, heads.pooler_bias).tanh()


def masked_lm(params: EncoderParams, x: Tensor, cfg: EncoderConfig, comm: Comm = LOCAL) -> Tensor:
    """Compute the logits of every token: hidden states ``[... t d]`` -> ``[... t vocab]``."""
    _check_head(cfg.masked_lm, "masked_lm")
    tied, heads = comm.load(params.embed).tokens if cfg.tied else None, comm.load(params.heads)
    y = ACTIVATIONS[cfg.head_activation](linear(x, heads.transform, heads.transform_bias))
    y = layer_norm(y, heads.transform_norm, heads.transform_norm_bias, cfg.norm_eps)
    return linear(y, heads.decoder if tied is None else tied, heads.decoder_bias)


def next_sentence(params: EncoderParams, x: Tensor, cfg: EncoderConfig, comm: Comm = LOCAL) -> Tensor:
    """Compute the two logits of "follows" and "does not": hidden states ``[... t d]`` -> ``[... 2]``."""
    _check_head(cfg.next_sentence, "next_sentence")
    heads = comm.load(params.heads)
    return linear(pooled(params, x, cfg, comm), heads.next_sentence, heads.next_sentence_bias)


def classify(params: EncoderParams, x: Tensor, cfg: EncoderConfig, comm: Comm = LOCAL) -> Tensor:
    """Compute the logits of a sequence's label: hidden states ``[... t d]`` -> ``[... num_labels]``."""
    _check_head(bool(cfg.num_labels), "num_labels")
    heads = comm.load(params.heads)
    if cfg.classifier == "pooler":
        y = pooled(params, x, cfg, comm)
    else:
        y = linear(x[..., 0, :], heads.class_dense, heads.class_dense_bias)
        y = y.tanh() if cfg.classifier == "tanh" else ACTIVATIONS[cfg.classifier](y)
    return linear(y, heads.classifier, heads.classifier_bias)


def discriminate(params: EncoderParams, x: Tensor, cfg: EncoderConfig, comm: Comm = LOCAL) -> Tensor:
    """Compute the logit of "this token was replaced" (Clark et al. 2020, "ELECTRA"): ``[... t d]`` -> ``[... t]``."""
    _check_head(cfg.discriminator, "discriminator")
    heads = comm.load(params.heads)
    y = ACTIVATIONS[cfg.activation](linear(x, heads.discriminator_dense, heads.discriminator_dense_bias))
    return linear(y, heads.discriminator, heads.discriminator_bias)[..., 0]


def _check_head(present: bool, name: str) -> None:
    if not present:
        raise ValueError(f"{name}: this config has no such head; load a checkpoint that has, or set it and train it")
