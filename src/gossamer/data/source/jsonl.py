"""JSON lines: one document per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.data.source import Document, Source
from gossamer.data.source._files import KEY, find, lines, remark, stamps
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest


@dataclass(frozen=True)
class Jsonl(Source):
    """The source of JSON lines: `field` of every line of the files that match. Files may be gzipped.

    The document "a.jsonl#3" is the third line.
    """

    files: str
    field: str = "text"

    def documents(self) -> Iterator[Document]:
        for name, file in find(self.files):
            yield from jsonl_documents(name, file, field=self.field)

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        return stamps(find(self.files))

    def remark(self) -> str:
        return remark(self.files)


def jsonl_documents(name: str, file: Path, *, field: str) -> Iterator[Document]:
    """Yield the documents of one file; every error is a BadInput with file:line."""
    for number, line in lines(file):
        if text := _text(line, field, where=f"{file}:{number}"):
            yield Document(f"{name}#{number}", text)


def _text(line: bytes, field: str, *, where: str) -> str:
    record = record_of(line, where)
    if field not in record:
        raise BadInput(f"{where}: no field {field!r}: {nearest(field, record)}", key=KEY)
    text = record[field]
    if not isinstance(text, str):
        raise bad_input(
            wanted=f"a string in field {field!r} at {where}",
            got=type(text).__name__,
            do="name the field that holds the text: {jsonl: {files: GLOB, field: NAME}}",
            key=KEY,
        )
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise bad_input(
            wanted=f"valid Unicode text at {where}",
            got="an unpaired surrogate (half of a surrogate pair, U+D800 to U+DFFF)",
            do="repair or remove the line",
            key=KEY,
        )
    return text


def record_of(line: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object of a line; raises BadInput that names `where`, "file:line"."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise bad_input(
            wanted="UTF-8 text",
            got=f"an invalid byte at offset {error.start} of the line at {where}",
            do="convert the file (iconv -f ENCODING -t utf-8)",
            key=KEY,
        ) from None
    except json.JSONDecodeError as error:
        raise bad_input(
            wanted=f"one JSON object per line at {where}",
            got=f"{line[:40].decode('utf-8', 'replace').strip()!r} ({error.msg} at column {error.colno})",
            do="repair or remove the line",
            key=KEY,
        ) from None
    except (RecursionError, ValueError) as error:  # brackets thousands deep, or a number of thousands of digits
        said = (
            "brackets that are nested too deep"
            if isinstance(error, RecursionError)
            else "a number with too many digits"
        )
        raise bad_input(
            wanted=f"one JSON object per line at {where}", got=said, do="repair or remove the line", key=KEY
        ) from None
    if not isinstance(record, dict):
        raise bad_input(
            wanted=f"a JSON object at {where}",
            got=type(record).__name__,
            do='write {"text": ...} on each line',
            key=KEY,
        )
    return record
