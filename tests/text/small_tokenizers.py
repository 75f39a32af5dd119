"""Two small tokenizers trained on the spot: byte-level BPE, and SentencePiece's layout with byte fallback."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Ein süßer Käse — à la carte; naïve façade.",
    "你好,世界。語言模型讀很多字。こんにちは",
    "emoji 😀😃👩‍👩‍👧 and flags 🇨🇭🇯🇵",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(directory: Path, tokenizer: Tokenizer, **settings) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_tokens(["tool call é", "é"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["<unk>", *SPECIAL])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for char in "▁abcdefghijklmnopqrstuvwxyzT.,你好":
        vocab[char] = len(vocab)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


def adding_bos(tokenizer: Tokenizer) -> Tokenizer:
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer
