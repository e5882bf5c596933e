"""Corpora: where the text comes from and how it is split. The published ones stand in `published.py`."""

import glob
import os
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from txl.data.hub import Rows
from txl.data.store import SPLITS, Corpus
from txl.data.text import Part, Text, file_part, separator_bytes
from txl.data.vocab import Vocabulary

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def cut(text: Text, fractions: Sequence[float | int]) -> dict[str, Text]:
    """Cuts a text by bytes, in order, into train, valid and test. Raises ValueError unless three shares make a whole."""
    if len(fractions) != 3 or not min(fractions) > 0 or not abs(sum(fractions) - 1) <= 1e-6:
        raise ValueError(f"data.fractions: must be three numbers above 0 that add up to 1, got {list(fractions)}")
    first = int(text.size * fractions[0])
    second = int(text.size * (fractions[0] + fractions[1]))
    parts = text.cut(0, first), text.cut(first, second), text.cut(second, text.size)
    return dict(zip(SPLITS, parts, strict=True))


def cut_corpus(
    find: Callable[[], Text], *, fractions: Sequence[float | int], max_bytes: int | None, **how: Any
) -> Corpus:
    """A corpus of one text, the first `max_bytes` of it cut by the fractions."""
    check_max_bytes(max_bytes)
    cut(Text([]), fractions)  # a mistake in the fractions is told before anything is read
    parts = cache(lambda: cut(start(find(), max_bytes), fractions))
    return Corpus(texts={name: lambda name=name: parts()[name] for name in SPLITS}, **how)


def start(text: Text, max_bytes: int | None) -> Text:
    """The first `max_bytes` of a text."""
    return text if max_bytes is None else text.cut(0, max_bytes)


def check_max_bytes(max_bytes: int | None) -> None:
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"data.max_bytes: must be at least 1, or null for the whole text; got {max_bytes}")


def python_docs(
    *, vocab: Vocabulary, fractions: list[float | int], max_bytes: int | None = None, cache_dir: str | None = None
) -> Corpus:
    """The help topics that ship inside CPython: about 0.46 MB of English, different a little in each release.

    The topics in sorted order, joined by two newlines, the first `max_bytes` of them cut by `fractions`.
    """

    def find() -> Text:
        from pydoc_data.topics import topics

        return Text.of("\n\n".join(topics[name] for name in sorted(topics)).encode())

    return cut_corpus(find, fractions=fractions, max_bytes=max_bytes, vocab=vocab, cache_dir=cache_dir)


def python_source(
    *, vocab: Vocabulary, fractions: list[float | int], max_bytes: int | None = None, cache_dir: str | None = None
) -> Corpus:
    """The standard library's own .py files in path order, without tests: about 12 MB.

    Joined by two newlines, the first `max_bytes` of them cut by `fractions`.
    """

    def find() -> Text:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path.relative_to(root) for path in root.rglob("*.py")]
        library = sorted((path for path in paths if not NOT_LIBRARY & set(path.parts)), key=Path.as_posix)
        return Text.of(b"\n\n".join((root / path).read_bytes() for path in library))

    return cut_corpus(find, fractions=fractions, max_bytes=max_bytes, vocab=vocab, cache_dir=cache_dir)


def text_files(
    *,
    vocab: Vocabulary,
    train: str | list[str] | None = None,
    valid: str | list[str] | None = None,
    test: str | list[str] | None = None,
    path: str | None = None,
    fractions: list[float | int] = (0.9, 0.05, 0.05),
    max_bytes: int | None = None,
    document_separator: str | None = None,
    reset_at_document: bool = False,
    shuffle_documents: bool = False,
    cache_dir: str | None = None,
) -> Corpus:
    """The user's own files, byte for byte: those of three splits, or of one, `train`, that `fractions` cut.

    Each is a file, a pattern such as `news/*.txt`, or a list of these; the files of a pattern are read in the order of
    their names. `path` names a folder that holds train.txt, valid.txt and test.txt. Every file is a document of its own,
    and with a `document_separator` so is what follows each; where a file does not end with it, it is put in before the
    next. `max_bytes` reads just the start of each split. Raises ValueError for files that are missing, empty, named twice
    over, or can't be read.
    """
    check_max_bytes(max_bytes)
    given: dict[str, str | list[str] | Path | None] = {"train": train, "valid": valid, "test": test}
    how = dict(
        vocab=vocab,
        document_separator=document_separator,
        reset_at_document=reset_at_document,
        shuffle_documents=shuffle_documents,
        cache_dir=cache_dir,
    )
    if path is not None:
        if any(given.values()):
            raise ValueError("data.path: give either a folder or the files data.train, data.valid, data.test, not both")
        given = {name: Path(path) / f"{name}.txt" for name in SPLITS}
    if train is not None and valid is None and test is None:
        find = _finder("train", train, document_separator, max_bytes)
        return cut_corpus(find, fractions=fractions, max_bytes=max_bytes, **how)
    texts = {name: _finder(name, files, document_separator, max_bytes) for name, files in given.items()}
    return Corpus(texts=texts, **how)


def _finder(
    split: str, files: str | list[str] | Path | None, separator: str | None, max_bytes: int | None
) -> Callable[[], Text]:
    def find() -> Text:
        if not files:
            raise ValueError(
                f"data.{split}: no file given; give data.train, data.valid and data.test, or data.train alone to cut it"
            )
        names = [
            name for pattern in ([files] if isinstance(files, (str, Path)) else files) for name in _matching(pattern)
        ]
        parts = [file_part(Path(name), f"data.{split}") for name in names]
        return start(Text(separated(parts, separator)), max_bytes)

    return find


def _matching(pattern: str | Path) -> list[str]:
    """The files that a pattern stands for, in the order of their names; itself where it is a file, or none matches."""
    if isinstance(pattern, Path) or os.path.exists(pattern):  # a Path is no pattern; unlike Path's, never an OSError
        return [str(pattern)]
    return sorted(name for name in glob.glob(pattern, recursive=True) if Path(name).is_file()) or [pattern]


def separated(parts: list[Part], separator: str | None) -> list[Part]:
    """The parts with the separator between them, where one does not end with it."""
    between, result = separator_bytes(separator), []
    if between is None:
        return parts
    for part in parts:
        result.append(part)
        if part is not parts[-1] and part.read(max(0, len(part) - len(between)), len(part)) != between:
            result.append(Part(between, 0, len(between), begins=False))
    return result


def hub(
    *,
    vocab: Vocabulary,
    id: str,
    column: str = "text",
    config: str | None = None,
    revision: str | None = None,
    train_split: str = "train",
    valid_split: str | None = "validation",
    test_split: str | None = "test",
    fractions: list[float | int] = (0.9, 0.05, 0.05),
    max_bytes: int | None = None,
    document_separator: str | None = "\n",
    reset_at_document: bool = False,
    shuffle_documents: bool = False,
    cache_dir: str | None = None,
) -> Corpus:
    """Any data set of the Hugging Face hub, or a local folder in its layout, by `datasets`: each row of a column a document.

    `train_split`, `valid_split` and `test_split` name its splits; without the last two the rows of the first are cut by
    the `fractions`. Rows are joined by the `document_separator`. Raises ValueError for one that cannot be fetched.
    """
    check_max_bytes(max_bytes)
    names = {"train": train_split, "valid": valid_split, "test": test_split}
    how = dict(
        vocab=vocab,
        document_separator=document_separator,
        reset_at_document=reset_at_document,
        shuffle_documents=shuffle_documents,
        cache_dir=cache_dir,
    )

    def find(name: str) -> Text:
        if names[name] is None:
            raise ValueError(
                f"data.{name}_split: names no split of {id}; make both valid_split and test_split null to cut one"
            )
        rows = Rows(id=id, split=names[name], column=column, config=config, revision=revision, key="data.id")
        between = separator_bytes(document_separator) or b""
        documents = reset_at_document or shuffle_documents
        return rows.text(cache_dir, between=between, documents=documents, max_bytes=max_bytes)

    if valid_split is None and test_split is None:
        return cut_corpus(lambda: find("train"), fractions=fractions, max_bytes=max_bytes, **how)
    return Corpus(texts={name: lambda name=name: find(name) for name in SPLITS}, **how)
