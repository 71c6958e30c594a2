"""The encoder of the BERT, RoBERTa, DistilBERT and ELECTRA families as a function of its parameters.

    x = encoder.forward(params, tokens, cfg, segments=mask)     # [b t d], every token sees its whole document
    logits = encoder.masked_lm(params, x, cfg)                  # [b t vocab]
    scores = encoder.classify(params, x, cfg)                   # [b labels]

Embeddings of tokens, positions and token types are added and normalised (Devlin et al. 2019, "BERT"). A layer adds
attention, normalises, adds an MLP and normalises again. All products have biases. A family is a choice of switches of
:class:`EncoderConfig`, and so is the presence of a pooler and of each head.

*Padding and packed documents.* Tokens with equal ``segments`` see each other and no others. An attention mask of ones
and zeros is such a numbering, wherever its zeros are. Positions count from the first token of a document. So padding on
the left moves no position, unlike in transformers' BERT, which there wants ``position_ids``.

Weights, blocks, and ``comm`` are as in ``models.decoder``. Dropout is never applied.
"""

from .config import ACTIVATIONS, EncoderConfig
from .heads import classify, discriminate, masked_lm, next_sentence, pooled
from .layers import forward, positions
from .params import EncoderEmbeddings, EncoderHeads, EncoderLayer, EncoderParams, dims, init, shapes

__all__ = [
    "ACTIVATIONS", "EncoderConfig", "EncoderEmbeddings", "EncoderHeads", "EncoderLayer", "EncoderParams", "classify",
    "dims", "discriminate", "forward", "init", "masked_lm", "next_sentence", "pooled", "positions", "shapes",
]  # fmt: skip
