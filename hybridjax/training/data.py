"""Token files, training batches as a pure function of (seed, step), and the held-out documents."""

import dataclasses
import hashlib
import json
import logging
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from hybridjax.errors import ConfigError
from hybridjax.training import corpus
from hybridjax.training.corpus import Document, Split
from hybridjax.training.tokenizer import (
    BOS,
    EOS,
    IM_END,
    IM_START,
    encode_plain,
    save_tokenizer,
    train_tokenizer,
)

log = logging.getLogger(__name__)

FORMAT = 1
CHAT_SHARE = 0.25
_USER_CHARS, _ASSISTANT_CHARS = 200, 600


@dataclasses.dataclass(frozen=True)
class HeldOutDocument:
    """Where one held-out document lies in the token file and in the text file.

    Attributes:
      path, source: as in the corpus.
      token_start, tokens: its tokens, ``<s>`` and ``</s>`` included.
      byte_start, bytes: its UTF-8 text, which has neither.
    """

    path: str
    source: str
    token_start: int
    tokens: int
    byte_start: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """What ``prepare`` wrote.

    Attributes:
      directory: where it lies; holds the tokenizer files too.
      info: the content of ``data.json``.
      train: uint16[N] documents one after the other, each from ``<s>`` to ``</s>``.
      heldout: uint16[M], likewise.
      documents: the held-out documents in file order.
      text: the held-out documents' bytes, concatenated.
    """

    directory: Path
    info: dict[str, Any]
    train: np.ndarray
    heldout: np.ndarray
    documents: tuple[HeldOutDocument, ...]
    text: bytes

    @property
    def vocab_size(self) -> int:
        return self.info["vocab_size"]

    @property
    def bytes_per_token(self) -> float:
        """Of the training text, for turning a training loss into bits per byte."""
        return sum(g["bytes"] for g in self.info["train"].values()) / len(self.train)


def prepare(
    directory: Path,
    cache: Path,
    *,
    vocab_size: int = 2048,
    documents: Sequence[Document] | None = None,
) -> PreparedData:
    """Gathers the corpus, trains the tokenizer on its training part and writes the token files.

    Writes ``train.bin``, ``heldout.bin`` (uint16), ``heldout.txt``, ``data.json``, ``manifest.json`` and
    the tokenizer files. A training document of which a hash says so appears a second time as an
    excerpt in chat form (``user``: some lines, ``assistant``: the lines that follow), so that the
    chat template's tokens mean something.

    Args:
      directory: where to write.
      cache: where downloaded packages are kept.
      vocab_size: of the tokenizer; at most 65536.
      documents: instead of the corpus, for tests.
    """
    if vocab_size > 2**16:
        raise ConfigError(f"vocab_size is {vocab_size}; token files hold ids below {2**16}")
    split = corpus.split_corpus(corpus.load_corpus(cache) if documents is None else documents)
    log.info(
        "corpus: %d training and %d held-out documents, %d near duplicates of held-out ones dropped",
        len(split.train),
        len(split.heldout),
        len(split.dropped),
    )
    tokenizer = train_tokenizer((d.text for d in split.train), vocab_size)
    save_tokenizer(tokenizer, directory)
    train = _wrap(encode_plain(tokenizer, [d.text for d in split.train]))
    chats = [ids for d in split.train if (ids := _chat(tokenizer, d)) is not None]
    heldout = _wrap(encode_plain(tokenizer, [d.text for d in split.heldout]))
    _check_lossless(tokenizer, split.heldout, heldout)
    _write_tokens(directory / "train.bin", train + _wrap(chats))
    _write_tokens(directory / "heldout.bin", heldout)
    (directory / "heldout.txt").write_bytes(b"".join(d.data for d in split.heldout))
    records = corpus.manifest(split)
    _write_json(directory / "manifest.json", {"documents": records, "dropped": split.dropped})
    info = _describe(split, train, chats, heldout, corpus.digest(records), tokenizer.get_vocab_size())
    for name in ("tokenizer.json", "train.bin", "heldout.bin", "heldout.txt"):
        info["sha256"][name] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    _write_json(directory / "data.json", info)
    return load_prepared(directory)


def load_prepared(directory: Path) -> PreparedData:
    """Opens a directory that ``prepare`` wrote; token files are memory-mapped.

    Raises:
      ConfigError: the directory holds no prepared data, or data of another format.
    """
    try:
        info = json.loads((directory / "data.json").read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"no prepared data in {directory}; write it with: "
            f"python -m hybridjax.train --prepare-data {directory}"
        ) from None
    if info.get("format") != FORMAT:
        raise ConfigError(f"{directory}/data.json has format {info.get('format')}; expected {FORMAT}")
    return PreparedData(
        directory=directory,
        info=info,
        train=np.memmap(directory / "train.bin", np.uint16, "r"),
        heldout=np.memmap(directory / "heldout.bin", np.uint16, "r"),
        documents=tuple(HeldOutDocument(**d) for d in info["heldout_documents"]),
        text=(directory / "heldout.txt").read_bytes(),
    )


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Rows to train on.

    Attributes:
      inputs: int32[B, L].
      targets: int32[B, L], the token after each input.
      mask: bool[B, L], False where the target is padding.
    """

    inputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray


def batch_at(tokens: np.ndarray, *, seed: int, step: int, batch_size: int, length: int) -> TokenBatch:
    """The batch of a step: windows at uniformly random places, which may cross documents.

    Depends on nothing but the arguments, so a resumed run sees the batches it would have seen.
    Token files shorter than a window are padded.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, max(len(tokens) - length, 1), size=batch_size)
    places = starts[:, None] + np.arange(length + 1)
    inside = places < len(tokens)
    window = np.where(inside, tokens[np.minimum(places, len(tokens) - 1)], EOS).astype(np.int32)
    return TokenBatch(window[:, :-1], window[:, 1:], inside[:, 1:])


def _wrap(documents: list[list[int]]) -> list[list[int]]:
    return [[BOS, *ids, EOS] for ids in documents]


def _chat(tokenizer: Tokenizer, document: Document) -> list[int] | None:
    """An excerpt in the form that the chat template gives a conversation, for a share of the documents."""
    fingerprint = int.from_bytes(hashlib.sha256(f"chat:{document.path}".encode()).digest()[:8], "big")
    lines = document.text.splitlines()
    if fingerprint >= CHAT_SHARE * 2**64 or len(lines) < 4:
        return None
    parts = ["", ""]
    for line in lines[fingerprint % (len(lines) // 2) :]:
        user = len(parts[0]) < _USER_CHARS
        if not user and len(parts[1]) >= _ASSISTANT_CHARS:
            break
        parts[0 if user else 1] += line + "\n"
    if not parts[1]:
        return None
    head, body, newline = encode_plain(
        tokenizer, ["user\n" + parts[0].rstrip(), "assistant\n" + parts[1].rstrip(), "\n"]
    )
    return [IM_START, *head, IM_END, *newline, IM_START, *body, IM_END, *newline]


def _check_lossless(tokenizer: Tokenizer, documents: list[Document], tokens: list[list[int]]) -> None:
    for document, ids in zip(documents, tokens, strict=True):
        if tokenizer.decode(ids[1:-1], skip_special_tokens=False) != document.text:
            raise ConfigError(f"the tokenizer does not reproduce {document.path}")


def _describe(
    split: Split,
    train: list[list[int]],
    chats: list[list[int]],
    heldout: list[list[int]],
    digest: str,
    vocab_size: int,
) -> dict[str, Any]:
    groups: dict[str, Counter[str]] = {}
    for document, ids in zip(split.train, train, strict=True):
        group = groups.setdefault(document.source, Counter())
        group.update(documents=1, tokens=len(ids), bytes=len(document.data))
    if chats:
        groups["chat"] = Counter(documents=len(chats), tokens=sum(len(c) + 2 for c in chats))
        groups["chat"]["bytes"] = 0
    table, token_start, byte_start = [], 0, 0
    for document, ids in zip(split.heldout, heldout, strict=True):
        size = len(document.data)
        table.append(HeldOutDocument(document.path, document.source, token_start, len(ids), byte_start, size))
        token_start, byte_start = token_start + len(ids), byte_start + size
    return {
        "format": FORMAT,
        "vocab_size": vocab_size,
        "python": platform.python_version(),
        "licences": {
            name: text
            for name, text in corpus.LICENCES.items()
            if any(d.path.startswith(f"{name}/") for d in split.train)
        },
        "corpus_sha256": digest,
        "sha256": {},
        "train": {name: dict(group) for name, group in sorted(groups.items())},
        "dropped": len(split.dropped),
        "heldout_documents": [dataclasses.asdict(d) for d in table],
    }


def _write_tokens(path: Path, documents: list[list[int]]) -> None:
    with path.open("wb") as file:
        for ids in documents:
            file.write(np.asarray(ids, np.uint16).tobytes())


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
