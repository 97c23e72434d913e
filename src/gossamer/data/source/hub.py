"""A dataset of the Hugging Face hub by its name, read as a stream; needs the package `datasets`.

The rows are kept as JSON lines in the cache while they come. So a run reads the network once, its samples have a fixed
order on any number of ranks, and a reading that was cut off goes on at the next row. Nothing else of the dataset is
stored, and no code of it is run.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from gossamer.data.cache import held, open_cache, read_json, write_json
from gossamer.data.rendering import Rendering
from gossamer.data.source import Document, Source, parse_source
from gossamer.data.source._files import KEY
from gossamer.data.source._kept_rows import FILE, keep_rows
from gossamer.data.tokenizer import Tokenizer
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.extras import install
from gossamer.spec.method_config import MethodConfig
from gossamer.spec.suggest import nearest

_READERS = ("jsonl", "chat", "pairs")
_FORMATS = ("parquet", "json", "csv", "text", "arrow")  # data alone; others of the package may read pickles


@dataclass(frozen=True)
class Hub(Source):
    """The source of a dataset on the Hugging Face hub: the rows of split `split` of `dataset`, in their order there.

    `dataset`: its name, "owner/name", or a local folder of the same files. `read`: what reads a row, written as a
    source without its files: jsonl (a text; {jsonl: {field: body}}), chat or pairs. `rows`: read the first so many,
    null all. `subset`: for a dataset with several. `revision`: a branch, tag or commit; null the newest when it is
    first read. `columns`: {messages: dialog} reads the column `dialog` as `messages` and no other one; empty: all
    columns under their own names.
    """

    dataset: str
    read: str | dict[str, Any] = field(default="jsonl", hash=False)
    split: str = "train"
    rows: int | None = None
    subset: str | None = None
    revision: str | None = None
    columns: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise bad_input(wanted="1 row or more", got=str(self.rows), do="write null for all rows", key="rows")
        self._reader(Path(FILE))

    @property
    def paired(self) -> bool:
        return self._reader(Path(FILE)).paired

    def fetched(self, cache: Path) -> Source:
        identity = [self.dataset, self.split, self.rows, self.subset, self.revision, self._wanted(), self._stamps()]
        folder = cache / "hub" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder / "lock"):
            return self._reader(keep_rows(folder, lambda done: self._rows(done, folder)))

    def documents(self) -> Iterator[Document]:
        return self.fetched(open_cache(None)).documents()

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        return self.fetched(open_cache(None)).stamp()

    def rendering(self, tokenizer: Tokenizer) -> Rendering | None:
        return self.fetched(open_cache(None)).rendering(tokenizer)

    def _reader(self, file: Path) -> Source:
        """Return the source that reads the kept rows in `file`. Raises BadInput for a `read` that is no reader."""
        config = MethodConfig.parse(self.read, key="read")
        if config.name not in _READERS:
            raise BadInput(f"{config.name!r} reads no rows: {nearest(config.name, _READERS)}", key="read")
        if "files" in config.parameters:
            raise bad_input(
                wanted="a reader without files", got="files", do="leave them out: the rows are the files", key="read"
            )
        written: dict[str, Any] = {config.name: {**config.parameters, "files": glob.escape(str(file))}}
        return parse_source(written, key="read")

    def _wanted(self) -> dict[str, str]:
        """Return name -> column of what is read; empty: all columns. A reader of texts needs one."""
        config = MethodConfig.parse(self.read)
        if self.columns or config.name != "jsonl":
            return dict(self.columns)
        name = str(config.parameters.get("field", "text"))
        return {name: name}

    def _folder(self) -> Path | None:
        """Return the local folder that `dataset` names; None for a name on the hub."""
        place = Path(self.dataset).expanduser()
        return place.resolve() if place.is_dir() else None

    def _stamps(self) -> list[tuple[str, int, int]]:
        """Return (name, bytes, modified_ns) of the files in a local folder: when one changes, it is read again."""
        root = self._folder()
        files = sorted(file for file in root.rglob("*") if file.is_file()) if root else []
        return [(str(file), one.st_size, one.st_mtime_ns) for file in files for one in (file.stat(),)]

    def _rows(self, done: int, folder: Path) -> Iterator[str]:
        """Yield the rows after the first `done` as JSON, all of one commit of the dataset."""
        wanted, package = self._wanted(), _datasets()
        texts = MethodConfig.parse(self.read).name == "jsonl"  # a row without a text is left out, as of Parquet files
        bars = package.are_progress_bars_disabled()
        package.disable_progress_bars()
        try:
            stream = self._stream(package, self._commit(folder))
            known = stream.column_names
            if known is not None and wanted:
                _check_columns(wanted, known, self.dataset)
                stream = stream.select_columns(list(dict.fromkeys(wanted.values())))
            rows = stream.skip(done)
            for row in rows if self.rows is None else rows.take(max(0, self.rows - done)):
                yield _line(row, wanted, self.dataset, null="" if texts else None)
                done += 1
        except BadInput:
            raise
        except Exception as error:  # of the network, the hub, or a file: each has classes of its own
            raise self._unread(error, done) from None
        finally:
            if not bars:
                package.enable_progress_bars()

    def _unread(self, error: Exception, done: int) -> BadInput:
        said = " ".join(str(error).split())[:300] or "no message"
        kept = f" (the {done:,} rows read so far are kept: the next start goes on after them)" if done else ""
        return bad_input(
            wanted=f"to read split {self.split} of the dataset {self.dataset}",
            got=f"{type(error).__name__}: {said}",
            do="check the name and the network; where there is none, download the dataset elsewhere, and give its "
            f"folder: hf:DIR{kept}",
            key=KEY,
        )

    def _stream(self, package: ModuleType, commit: str | None) -> Any:
        root = self._folder()
        path = self.dataset if root is None else str(root)
        builder = package.load_dataset_builder(path, self.subset, revision=commit)
        format_ = type(builder).__module__.rpartition(".")[2]
        if format_ not in _FORMATS:
            raise bad_input(
                wanted=f"a dataset of {', '.join(_FORMATS)} files",
                got=f"{self.dataset}, of format {format_}",
                do="convert it with the package datasets, and give the folder that save_to_disk writes: hf:DIR",
                key=KEY,
            )
        return builder.as_streaming_dataset(split=self.split)

    def _commit(self, folder: Path) -> str | None:
        """Return the commit of the dataset that is read: that of an earlier reading that stopped, else the newest."""
        if self._folder() is not None:
            return None
        noted, known = folder / "commit.json", read_json(folder / "commit.json")
        if known is None:
            api = importlib.import_module("huggingface_hub").HfApi()
            found = api.dataset_info(self.dataset, revision=self.revision)
            known = {"dataset": self.dataset, "commit": str(found.sha)}
            write_json(noted, known)
        return str(known["commit"])


def _datasets() -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise bad_input(
            wanted="the package datasets, to read datasets of the hub",
            got="no such package",
            do=install("hub"),
            key=KEY,
        ) from None


def _check_columns(wanted: Mapping[str, str], known: list[str], dataset: str) -> None:
    for column in wanted.values():
        if column not in known:
            raise BadInput(f"{dataset} has no column {column!r}: {nearest(column, known)}", key=KEY)


def _line(row: Mapping[str, Any], wanted: Mapping[str, str], dataset: str, *, null: str | None) -> str:
    """Return the columns of a row that are read, as a JSON object, with `null` in place of missing values."""
    _check_columns(wanted, list(row), dataset)
    found = {name: row[column] for name, column in wanted.items()} if wanted else dict(row)
    try:
        return json.dumps({name: null if one is None else one for name, one in found.items()}, ensure_ascii=False)
    except TypeError as error:
        raise bad_input(
            wanted=f"texts, numbers and lists in every column of {dataset} that is read",
            got=str(error),
            do="name the columns to read: {hub: {dataset: NAME, columns: {messages: messages}}}",
            key=KEY,
        ) from None
