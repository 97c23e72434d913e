"""Text columns of Arrow and Parquet files. pyarrow is imported when a file is opened, not before."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gossamer.data.source._files import KEY, unreadable
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.extras import install
from gossamer.spec.suggest import nearest


def parquet_texts(file: Path, column: str) -> Iterator[tuple[int, str]]:
    """Yield (row, text) of every row of a Parquet file whose text is not empty, a row group at a time."""
    try:
        table = _pyarrow("pyarrow.parquet").ParquetFile(file)
        _check(table.schema_arrow, column, file)
        yield from _rows(batch.column(0) for batch in table.iter_batches(columns=[column]))
    except BadInput:
        raise
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise unreadable(file, error) from None


def arrow_texts(file: Path, column: str) -> Iterator[tuple[int, str]]:
    """Yield (row, text) of a file in Arrow's stream format, as `datasets.save_to_disk` writes them; memory-mapped."""
    try:
        with _pyarrow("pyarrow").memory_map(str(file)) as mapped:
            stream = _pyarrow("pyarrow.ipc").open_stream(mapped)
            _check(stream.schema, column, file)
            yield from _rows(batch.column(column) for batch in stream)
    except BadInput:
        raise
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from None


def _rows(columns: Iterator[Any]) -> Iterator[tuple[int, str]]:
    first = 0
    for values in columns:
        for row, text in enumerate(values.to_pylist(), start=first):
            if text:
                yield row, text
        first += len(values)


def _check(schema: Any, column: str, file: Path) -> None:
    if column not in schema.names:
        raise BadInput(f"{file} has no column {column!r}: {nearest(column, schema.names)}", key=KEY)
    kind = str(schema.field(column).type)
    if kind not in ("string", "large_string", "string_view"):
        raise bad_input(
            wanted=f"strings in column {column!r} of {file}", got=kind, do="name a column of strings", key=KEY
        )


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise bad_input(
            wanted="pyarrow, to read Parquet and Arrow files",
            got="no such package",
            do=install("parquet"),
            key=KEY,
        ) from None
