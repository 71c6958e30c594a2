"""Tiny tokenizers of the kinds that Hugging Face folders hold."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ["the quick brown fox's tail jumps over 1234567 lazy dogs, isn't it?\n\n  Yes: über & ñandú!  "] * 3


def byte_level(expression=None, whole=False, nfc=False, first=None, size=300):
    """Train byte-level BPE with a splitting expression, GPT-2's by default, and two added tokens."""
    out = Tokenizer(models.BPE(ignore_merges=whole))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    split = [] if expression is None else [pre_tokenizers.Split(Regex(expression), "isolated")]
    out.pre_tokenizer = pre_tokenizers.Sequence([*split, level]) if split else level
    out.decoder = decoders.ByteLevel()
    if nfc:
        out.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    out.train_from_iterator(TEXTS, trainer)
    out.add_tokens(["<think>"])
    if first:
        out.post_processor = processors.TemplateProcessing(
            f"{first} $A", special_tokens=[(first, out.token_to_id(first))]
        )
    return out


def write(folder, tokenizer, **options):
    """Write a tokenizer, and the options of a tokenizer_config.json if there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if options:
        (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder
