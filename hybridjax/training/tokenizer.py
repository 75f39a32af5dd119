"""Trains the byte-level BPE tokenizer of the bundled models and writes the files that loaders read."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from hybridjax.errors import ConfigError

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
UNK, BOS, EOS, IM_START, IM_END = range(len(SPECIAL_TOKENS))
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Digits stand alone. A line end takes the punctuation before it and the indentation after it along, so
# that "):" + newline + eight spaces can be one token; words may take one leading space or sign.
_PIECES = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)\b",
        r"[\r\n]+[ \t]*",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+(?:[\r\n]+[ \t]*)?",
        r"[ \t]+(?=[ \t]\S)",
        r"\s+",
    )
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
    """Learns a lossless byte-level BPE vocabulary.

    Any text round-trips: there is no normalisation, and all 256 bytes are tokens. The result depends
    only on the texts, not on their order or on the number of threads. Encoding with special tokens
    puts ``<s>`` in front.

    Args:
      texts: the training documents.
      vocab_size: entries in all, the five special tokens and 256 bytes included.

    Raises:
      ConfigError: ``vocab_size`` leaves no room for bytes and special tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(f"vocab_size is {vocab_size}; it must be at least {SMALLEST_VOCABULARY}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, model_max_length: int = 4096) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` with the chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL_TOKENS[UNK],
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[EOS],
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_plain(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Ids of each text alone: no ``<s>``, and text that spells a special token stays text."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    finally:
        tokenizer.encode_special_tokens = before
