"""Datasets of the hub: local folders of the same files stand for them, as there is no network in tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.chats import tokenizer_folder
from gossamer.data import open_corpus
from gossamer.data.source import parse_source
from gossamer.spec.errors import BadInput
from gossamer.spec.extras import install

ROWS = 30


def dataset(folder: Path, kind: str = "parquet") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    columns: dict[str, list[Any]] = {
        "text": [f"text {n} caf\u00e9\r\n" if n % 7 else None for n in range(ROWS)],
        "dialog": [
            [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}", "tool_calls": None}]
            for n in range(ROWS)
        ],
        "prompt": [f"p{n}" for n in range(ROWS)],
        "chosen": [f"c{n}" for n in range(ROWS)],
        "rejected": [f"r{n}" for n in range(ROWS)],
        "data": [b"\0"] * ROWS,
    }
    if kind == "json":
        lines = (
            json.dumps({name: values[n] for name, values in columns.items() if name != "data"}) for n in range(ROWS)
        )
        (folder / "train.jsonl").write_text("\n".join(lines))
        return folder
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part in range(2):
        rows = slice(part * ROWS // 2, (part + 1) * ROWS // 2)
        table = arrow.table({name: values[rows] for name, values in columns.items()})
        writer.write_table(table, folder / f"train-0000{part}-of-00002.parquet", row_group_size=4)
    return folder


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_rows_are_read_in_order_and_kept(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("datasets")
    found = parse_source(f"hub:{dataset(tmp_path / 'set', kind)}").fetched(tmp_path / "cache")
    documents = [*found.documents()]
    wanted = [(f"rows.jsonl#{n + 1}", f"text {n} caf\u00e9\r\n") for n in range(ROWS) if n % 7]
    assert [(one.path, one.text) for one in documents] == wanted
    (file,) = (tmp_path / "cache").rglob("rows.jsonl")
    assert set(json.loads(file.read_text("utf-8").splitlines()[0])) == {"text"}, "other columns are not kept"


def test_the_first_rows_and_pairs_of_other_columns(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = str(dataset(tmp_path / "set"))
    written = {"hub": {"dataset": folder, "rows": 17, "read": "pairs"}}
    with pytest.raises(BadInput, match=r"in every column of .* that is read, got .*bytes.* name the columns to read"):
        parse_source(written).fetched(tmp_path / "cache")
    written["hub"]["columns"] = {name: name for name in ("prompt", "chosen", "rejected")}
    found = [*parse_source(written).fetched(tmp_path / "cache").documents()]
    assert len(found) == 17 and found[16].rejected[-1].content == "r16"
    written["hub"] |= {"read": "chat", "columns": {"messages": "dialog"}, "rows": 200}
    found = [*parse_source(written).fetched(tmp_path / "cache").documents()]
    assert [one.messages[1].content for one in found] == [f"a{n}" for n in range(ROWS)]


def test_a_corpus_of_it_is_that_of_its_lines(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder, words = dataset(tmp_path / "set"), tokenizer_folder(tmp_path / "words", "zephyr")
    columns = {"messages": "dialog"}
    hub = {"hub": {"dataset": str(folder), "read": {"chat": {"learn": "answers"}}, "columns": columns}}
    settings: dict[str, Any] = {"tokenizer": f"hf:{words}", "sequence": 64, "validation": 0.3, "cache": tmp_path / "c"}
    corpus = open_corpus(source=hub, **settings)
    (file,) = (tmp_path / "c").rglob("rows.jsonl")
    same = open_corpus(source=f"chat:{file}", **settings)
    assert corpus.fingerprint == same.fingerprint and len(corpus.train) + len(corpus.validation) > 1
    assert [Path(name) for name, _, _ in corpus.files] == [file]
    mixed = {
        "mixture": {"sources": {"one": hub, "two": f"jsonl:{file.parent}/n.jsonl"}, "weights": {"one": 1, "two": 1}}
    }
    (file.parent / "n.jsonl").write_text(
        "".join(json.dumps({"text": f"text {n} and more" * 9}) + "\n" for n in range(9))
    )
    assert open_corpus(source=mixed, **settings).fingerprint != corpus.fingerprint


def test_a_reading_that_stopped_goes_on_at_the_next_row_of_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that breaks after 11 rows, then at half a line; the dataset has a new commit by then."""
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    local, asked, skipped = str(dataset(tmp_path / "set")), [], []
    commits, breaks = iter(["first", "second"]), iter([11, None])
    make = datasets.load_dataset_builder

    class Broken:
        """The stream of a dataset that breaks after `after` rows."""

        def __init__(self, inner: Any, after: int | None) -> None:
            self.inner, self.after, self.column_names = inner, after, inner.column_names

        def select_columns(self, names: list[str]) -> Broken:
            return Broken(self.inner.select_columns(names), self.after)

        def skip(self, count: int) -> Any:
            skipped.append(count)
            rows = self.inner.skip(count)
            return rows if self.after is None else self._broken(rows)

        def _broken(self, rows: Any) -> Any:
            for number, row in enumerate(rows):
                if number == self.after:
                    raise ConnectionError("the line is dead")
                yield row

    def builder(name: str, subset: str | None, revision: str | None) -> Any:
        asked.append((name, subset, revision))
        found = make(local)
        stream = found.as_streaming_dataset
        monkeypatch.setattr(found, "as_streaming_dataset", lambda split: Broken(stream(split=split), next(breaks)))
        return found

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)

    def info(self: Any, repo_id: str, *, revision: str | None = None) -> Any:
        assert (repo_id, revision) == ("someone/texts", "main")
        return SimpleNamespace(sha=next(commits))

    monkeypatch.setattr(hub.HfApi, "dataset_info", info)
    source = parse_source({"hub": {"dataset": "someone/texts", "subset": "en", "revision": "main"}})
    with pytest.raises(BadInput, match=r"ConnectionError: the line is dead.*the 11 rows read so far are kept"):
        source.fetched(tmp_path / "cache")
    (part,) = (tmp_path / "cache").rglob("rows.part")
    with part.open("a") as stream:
        stream.write('{"text": "ha')
    found = [*source.fetched(tmp_path / "cache").documents()]
    assert [one.text for one in found] == [f"text {n} caf\u00e9\r\n" for n in range(ROWS) if n % 7]
    assert asked == [("someone/texts", "en", "first")] * 2 and skipped == [0, 11]
    assert source.fetched(tmp_path / "cache").stamp() and len(asked) == 2, "a complete one is not read again"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"split": "trian"}, "to read split trian of the dataset"),
        ({"read": {"jsonl": {"field": "txt"}}}, "has no column 'txt': did you mean 'text'?"),
        ({"read": "chat", "columns": {"messages": "dialogue"}}, "has no column 'dialogue': did you mean 'dialog'?"),
        ({"read": "chatt"}, "'chatt' reads no rows: did you mean 'chat'?"),
        ({"read": {"chat": {"files": "x"}}}, "a reader without files"),
        ({"read": {"chat": {"lern": "all"}}}, "did you mean 'learn'?"),
        ({"rows": 0}, "wanted 1 row or more, got 0"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    pytest.importorskip("datasets")
    folder = dataset(tmp_path / "set")
    with pytest.raises(BadInput) as caught:
        parse_source({"hub": {"dataset": str(folder), **given}}).fetched(tmp_path / "cache")
    assert said in str(caught.value) and caught.value.key.startswith("data.source")


def test_files_that_may_hold_pickles_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.xml").write_text("<a/>")
    with pytest.raises(BadInput, match=r"wanted a dataset of parquet, .* files, got .*, of format xml"):
        parse_source(f"hub:{tmp_path}/set").fetched(tmp_path / "cache")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput) as caught:
        parse_source("hub:someone/texts").fetched(tmp_path)
    assert install("hub") in str(caught.value)


def test_a_missing_network_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(BadInput, match="OSError: Name or service not known: check the name and the network"):
        parse_source("hub:someone/texts").fetched(tmp_path)
