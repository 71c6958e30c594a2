"""The encoder families: each one's keys of ``config.json``, architectures, and names of tensors.

Sources: the configuration and modelling files of transformers 5 for each model type.
"""

from dataclasses import dataclass, field
from typing import Any

from ..hf import keys
from ..hf.keys import Reader, boolean, integer, number

# Values of hidden_act that are equal functions, the name that is written first.
ACTIVATIONS = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"),
    "relu": ("relu",),
    "silu": ("silu", "swish"),
}


def _activation(raw: dict[str, Any], key: str) -> str:
    known = {name: ours for ours, names in ACTIVATIONS.items() for name in names}
    return known[keys.read(f"one of {', '.join(known)}", lambda got: isinstance(got, str) and got in known, raw, key)]


_KEYS: dict[str, tuple[str, Reader]] = {
    "vocab_size": ("vocab", integer), "hidden_size": ("dim", integer), "num_hidden_layers": ("num_layers", keys.layers),
    "num_attention_heads": ("num_heads", integer), "intermediate_size": ("hidden", integer),
    "max_position_embeddings": ("max_positions", integer), "type_vocab_size": ("num_types", integer),
    "layer_norm_eps": ("norm_eps", number), "hidden_act": ("activation", _activation),
    "tie_word_embeddings": ("tied", boolean),
}  # fmt: skip
_DEFAULTS = {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "tie_word_embeddings": True}
_DISTILBERT_KEYS: dict[str, tuple[str, Reader]] = {
    "vocab_size": ("vocab", integer), "dim": ("dim", integer), "n_layers": ("num_layers", keys.layers),
    "n_heads": ("num_heads", integer), "hidden_dim": ("hidden", integer),
    "max_position_embeddings": ("max_positions", integer), "activation": ("activation", _activation),
    "tie_word_embeddings": ("tied", boolean),
}  # fmt: skip

# Our name in a tree -> the module in a folder. A tensor's name is its module's, then ``.weight`` or ``.bias``.
EMBED = {
    "tokens": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm", "project": "embeddings_project",
}  # fmt: skip
_LAYER = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "o": "attention.output.dense", "attn_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "mlp_norm": "output.LayerNorm",
}  # fmt: skip
_DISTILBERT_LAYER = {
    "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin", "o": "attention.out_lin",
    "attn_norm": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2", "mlp_norm": "output_layer_norm",
}  # fmt: skip
_BERT_HEADS = {
    "transform": "cls.predictions.transform.dense", "transform_norm": "cls.predictions.transform.LayerNorm",
    "decoder": "cls.predictions.decoder", "next_sentence": "cls.seq_relationship", "classifier": "classifier",
}  # fmt: skip
_ROBERTA_HEADS = {
    "transform": "lm_head.dense", "transform_norm": "lm_head.layer_norm", "decoder": "lm_head.decoder",
    "class_dense": "classifier.dense", "classifier": "classifier.out_proj",
}  # fmt: skip
_DISTILBERT_HEADS = {
    "transform": "vocab_transform", "transform_norm": "vocab_layer_norm", "decoder": "vocab_projector",
    "class_dense": "pre_classifier", "classifier": "classifier",
}  # fmt: skip
_ELECTRA_HEADS = {
    "transform": "generator_predictions.dense", "transform_norm": "generator_predictions.LayerNorm",
    "decoder": "generator_lm_head", "class_dense": "classifier.dense", "classifier": "classifier.out_proj",
    "discriminator_dense": "discriminator_predictions.dense",
    "discriminator": "discriminator_predictions.dense_prediction",
}  # fmt: skip
# Architecture behind the family's name -> the fields of EncoderConfig that say which heads it has.
_PLAIN: dict[str, tuple[str, ...]] = {
    "Model": (), "ForMaskedLM": ("masked_lm",), "ForSequenceClassification": ("num_labels",),
}  # fmt: skip
_BERT: dict[str, tuple[str, ...]] = {
    "Model": ("pooler",), "ForMaskedLM": ("masked_lm",), "ForSequenceClassification": ("pooler", "num_labels"),
    "ForPreTraining": ("pooler", "masked_lm", "next_sentence"),
    "ForNextSentencePrediction": ("pooler", "next_sentence"),
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model type of transformers.

    classes   the beginning of its architectures' names; XLM-RoBERTa's is "XLMRoberta".
    prefix    of the encoder's tensors beside a head.
    keys      keys of config.json: field of EncoderConfig, and reader; defaults: values of absent keys.
    fixed     fields of EncoderConfig that all its models have.
    heads     the modules of heads; bias: the tensor of masked_lm's bias.
    stack     the module of the list of layers, and the modules of a layer.
    architectures  the ends of their names, and the heads of each.
    """

    classes: str
    prefix: str
    heads: dict[str, str]
    bias: str
    keys: dict[str, tuple[str, Reader]] = field(default_factory=lambda: _KEYS)
    defaults: dict[str, Any] = field(default_factory=lambda: _DEFAULTS)
    fixed: dict[str, Any] = field(default_factory=dict)
    stack: str = "encoder.layer"
    layer: dict[str, str] = field(default_factory=lambda: _LAYER)
    architectures: dict[str, tuple[str, ...]] = field(default_factory=lambda: _PLAIN)


_ROBERTA: dict[str, Any] = {
    "prefix": "roberta.", "heads": _ROBERTA_HEADS, "bias": "lm_head.bias", "fixed": {"classifier": "tanh"},
    "architectures": _PLAIN | {"Model": ("pooler",)},
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "bert": Family("Bert", "bert.", _BERT_HEADS, "cls.predictions.bias", architectures=_BERT),
    "roberta": Family("Roberta", **_ROBERTA),
    "xlm-roberta": Family("XLMRoberta", **_ROBERTA),
    "distilbert": Family(
        "DistilBert", "distilbert.", _DISTILBERT_HEADS, "vocab_projector.bias", _DISTILBERT_KEYS,
        {"activation": "gelu", "tie_word_embeddings": True}, {"num_types": 0, "classifier": "relu"},
        "transformer.layer", _DISTILBERT_LAYER,
    ),
    "electra": Family(
        "Electra", "electra.", _ELECTRA_HEADS, "generator_lm_head.bias",
        _KEYS | {"embedding_size": ("embed_dim", integer)}, _DEFAULTS | {"embedding_size": 128},
        {"classifier": "gelu"}, architectures=_PLAIN | {"ForPreTraining": ("discriminator",)},
    ),
}  # fmt: skip

# Keys without effect on results. Dropout is among them, because an encoder here never drops anything.
HARMLESS = keys.HARMLESS | frozenset(
    """hidden_dropout_prob attention_probs_dropout_prob classifier_dropout dropout attention_dropout qa_dropout
    seq_classif_dropout sinusoidal_pos_embds tie_weights_ gradient_checkpointing output_past directionality pooler_type
    pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    summary_type summary_use_proj summary_activation summary_last_dropout
    sbert_ce_default_activation_function sentence_transformers""".split()
)
# Keys that would change the forward pass, except at this value; and the fix.
ONLY: dict[str, tuple[Any, str]] = {
    "is_decoder": (False, "attention is bidirectional here; use an encoder"),
    "add_cross_attention": (False, "use an encoder"),
    "is_encoder_decoder": (False, "use an encoder"),
    "position_embedding_type": ("absolute", "relative positions are not implemented"),
    "pruned_heads": ({}, "save the pruned model with its real number of heads"),
}
