"""Files with a row for each token: Parquet, for data frames, and JSON lines, for everything else."""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from txl.data.encoding import Split
from txl.instruments.showing import token_texts
from txl.runtime import write_whole

AT_ONCE = 2**18  # rows that are made at a time


def check_format(name: str) -> None:
    """Raises ValueError for parquet without the package that writes it."""
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError("measure.format: parquet needs the package pyarrow; install it, or take jsonl")


def write_rows(path: Path, kind: str, split: Split, places: np.ndarray, losses: Mapping[str, np.ndarray]) -> None:
    """Writes position, id, text and losses of the tokens that follow the places; not-a-number is null."""
    texts = np.array(token_texts(split.vocab), dtype=object)

    def chunks() -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, len(places), AT_ONCE):
            at = places[start : start + AT_ONCE]
            ids = np.asarray(split.tokens[at + 1]).astype(np.int64)
            chosen = {name: values[at] for name, values in losses.items()}
            yield {"position": at + 1, "id": ids, "text": texts[ids], **chosen}

    write_whole(path, lambda file: WRITERS[kind](file, chunks(), list(losses)))


def _write_parquet(file: BinaryIO, chunks: Iterator[dict[str, np.ndarray]], losses: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    kinds = {"position": pyarrow.int64(), "id": pyarrow.int64(), "text": pyarrow.string()}
    schema = pyarrow.schema({**kinds, **dict.fromkeys(losses, pyarrow.float64())})
    with parquet.ParquetWriter(file, schema) as writer:
        for chunk in chunks:
            columns = {name: pyarrow.array(values, from_pandas=True) for name, values in chunk.items()}
            writer.write_table(pyarrow.table(columns, schema=schema))


def _write_jsonl(file: BinaryIO, chunks: Iterator[dict[str, np.ndarray]], losses: list[str]) -> None:
    for chunk in chunks:
        columns: dict[str, list[Any]] = {name: values.tolist() for name, values in chunk.items()}
        for name in losses:
            columns[name] = [None if value != value else value for value in columns[name]]
        for row in zip(*columns.values(), strict=True):
            file.write((json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n").encode())


WRITERS = {"parquet": _write_parquet, "jsonl": _write_jsonl}
