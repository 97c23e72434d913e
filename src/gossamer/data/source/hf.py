"""A Hugging Face dataset in a local folder, read without the `datasets` package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.data.source import Document, Source
from gossamer.data.source._arrow import arrow_texts, parquet_texts
from gossamer.data.source._files import KEY, once, stamps, told_of_links, unreadable
from gossamer.data.source.jsonl import jsonl_documents
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest

_KINDS = ("*.arrow", "*.parquet", "*.jsonl", "*.jsonl.gz")
_USUAL_SPLITS = ("train", "test", "validation", "valid", "dev")


@dataclass(frozen=True)
class Hf(Source):
    """The source of a Hugging Face dataset: `column` of split `split` in `directory`.

    `directory` is what `save_to_disk` wrote, or a folder of Parquet or JSON lines.
    In a plain folder the files whose name or folder starts with the split's name are read, as on the hub
    ("train-00000-of-00002.parquet", "train/a.jsonl"); where no file names a split, all are.
    """

    directory: str
    column: str = "text"
    split: str = "train"

    def documents(self) -> Iterator[Document]:
        for name, file in self._files():
            yield from _read(name, file, self.column)

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        return stamps(self._files())

    def remark(self) -> str:
        root = self._root()
        return "" if (root / "state.json").exists() else told_of_links(_matching(root, self.split), self.directory)

    def _files(self) -> list[tuple[str, Path]]:
        root = self._root()
        if (root / "state.json").exists():
            return [(f["filename"], root / f["filename"]) for f in _json(root / "state.json")["_data_files"]]
        return once(_matching(root, self.split))

    def _root(self) -> Path:
        root = Path(self.directory).expanduser()
        if not root.is_dir():
            raise bad_input(
                wanted="the folder of a dataset",
                got=f"{root}, which is no folder" if root.exists() else f"{root}, which does not exist",
                do="download the dataset, then give the path of its folder",
                key=KEY,
            )
        if (root / "dataset_dict.json").exists():
            splits = _json(root / "dataset_dict.json")["splits"]
            if self.split not in splits:
                raise BadInput(f"{root} has no split {self.split!r}: {nearest(self.split, splits)}", key=KEY)
            root = root / self.split
        return root


def _matching(root: Path, split: str) -> list[tuple[str, Path]]:
    for kind in _KINDS:
        found = sorted((file.relative_to(root).as_posix(), file) for file in root.rglob(kind))
        named = [(name, file) for name, file in found if _names_split(name, split)]
        if not named and any(_names_split(name, usual) for name, _ in found for usual in _USUAL_SPLITS):
            raise BadInput(f"{root} has no file of split {split!r}: {nearest(split, (n for n, _ in found))}", key=KEY)
        if found:
            return named or found
    raise bad_input(
        wanted=f"a dataset in {root}", got=f"no {', '.join(_KINDS)}", do="give the folder that holds the files", key=KEY
    )


def _names_split(name: str, split: str) -> bool:
    return any(re.match(rf"{re.escape(split)}([-_.]|$)", part) for part in name.split("/"))


def _read(name: str, file: Path, column: str) -> Iterator[Document]:
    if ".jsonl" in file.suffixes:
        yield from jsonl_documents(name, file, field=column)
        return
    texts = parquet_texts if file.suffix == ".parquet" else arrow_texts
    for row, text in texts(file, column):
        yield Document(f"{name}#{row}", text)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from None
