"""Texts from the Hugging Face hub, by its library `datasets`: rows of a column, written to one file that is read like any other."""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from txl.data.store import cache_folder
from txl.data.text import Part, Text
from txl.runtime import write_whole

BATCH = 10_000  # rows read at a time


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A column of a data set on the hub, or in a local folder of the same layout.

    `files` are patterns inside the data set, where its own configurations do not serve. `key` and `otherwise` go into the
    error for a data set that cannot be had: what to change, and how to do without.
    """

    id: str
    split: str
    column: str
    config: str | None = None
    revision: str | None = None
    files: str | None = None
    key: str = "data.path"
    otherwise: str = ""

    def load(self) -> Any:
        """The `datasets.Dataset`. Raises ValueError in one line, however the library chooses to fail."""
        given: dict[str, Any] = {"name": self.config, "revision": None if Path(self.id).is_dir() else self.revision}
        if self.files is not None:
            given = {**given, "name": None, "data_files": {self.split.partition("[")[0]: self.files}}
        try:
            rows = _library().load_dataset(self.id, split=self.split, **given)
        except Exception as error:  # no network, no such data set, a script, a broken file: each has its own class
            words = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.key}: {self.id} cannot be had from the hub ({words}){self.otherwise}") from error
        if self.column not in rows.column_names:
            raise ValueError(f"data.column: {self.id} has no {self.column!r}; it has {', '.join(rows.column_names)}")
        return rows

    def text(
        self,
        cache_dir: str | None,
        *,
        written: Callable[[str], str] = str,
        between: bytes = b"",
        documents: bool = False,
        max_bytes: int | None = None,
    ) -> Text:
        """All rows as one text, `between` between them, written to a file in the cache once; `written` restores a row.

        Where the rows are to count as `documents`, it warns if `between` also stands inside some of them.

        Raises ValueError for a row that is no text, or a cache that cannot be written.
        """
        rows = self.load()
        whose = {name: value for name, value in asdict(self).items() if name not in ("key", "otherwise")}
        known = [
            whose,
            rows._fingerprint,
            len(rows),
            getattr(written, "__name__", ""),
            between.hex(),
            documents,
            max_bytes,
        ]
        name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
        path = cache_folder(cache_dir) / f"hub-{self.split}-{name}.txt"
        if not path.exists():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, lambda file: self._write(rows, file, written, between, documents, max_bytes))
            except OSError as error:
                raise ValueError(f"cache_dir: cannot write {path.parent} ({error.strerror or error})") from error
        return Text([Part(path, 0, path.stat().st_size)])

    def _write(
        self,
        rows: Any,
        file: BinaryIO,
        written: Callable[[str], str],
        between: bytes,
        documents: bool,
        max_bytes: int | None,
    ) -> None:
        size, inside, begun = 0, 0, False
        for batch in rows.select_columns([self.column]).iter(batch_size=BATCH):
            for row in batch[self.column]:
                if not isinstance(row, str):
                    raise ValueError(f"data.column: {self.column!r} of {self.id} holds {type(row).__name__}, not text")
                block = written(row).encode("utf-8", "surrogatepass")
                inside += bool(between) and between in block.removesuffix(between)
                block = between + block if begun else block
                begun = True
                block = block if max_bytes is None else block[: max_bytes - size]
                size += file.write(block)
            if size == max_bytes:
                break
        if inside and documents:
            print(f"warning: data.document_separator also stands inside {inside:,} of the rows", file=sys.stderr)


def _library() -> Any:
    """`datasets`, without its retries and remarks; its bars stay, on a terminal."""
    import datasets
    from huggingface_hub import logging

    logging.set_verbosity_error()
    datasets.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets
