"""What every source owes: the same documents in the same order, none empty, each with a name of its own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.data.manifest import manifest
from gossamer.data.source import Source, build, names
from gossamer.spec.errors import BadInput

ROWS = ["first", "", "second\r\nline", "caf\u00e9 \u4e16\u754c", "last"]


def text(folder: Path) -> dict[str, Any]:
    for number, row in enumerate(ROWS):
        file = folder / f"sub{number % 2}" / f"{number}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(row.encode())
    return {"files": f"{folder}/**/*.txt"}


def jsonl(folder: Path) -> dict[str, Any]:
    lines = "".join(json.dumps({"text": row, "n": n}) + "\n\n" for n, row in enumerate(ROWS))
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return {"files": f"{folder}/*.jsonl*"}


def parquet(folder: Path) -> dict[str, Any]:
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    for name in ("b", "a"):
        writer.write_table(
            arrow.table({"n": [*range(6)], "text": [*ROWS, None]}), folder / f"{name}.parquet", row_group_size=2
        )
    return {"files": f"{folder}/*.parquet"}


def hf(folder: Path) -> dict[str, Any]:
    """What `datasets` writes with DatasetDict.save_to_disk."""
    arrow = pytest.importorskip("pyarrow")
    (folder / "train").mkdir()
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    shards = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    (folder / "train" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in shards]}))
    for name in shards:
        table = arrow.table({"text": ROWS})
        with (
            arrow.OSFile(str(folder / "train" / name), "wb") as sink,
            arrow.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(table, max_chunksize=2)
    return {"directory": str(folder)}


def chat(folder: Path) -> dict[str, Any]:
    said = [row for row in ROWS if row]
    turns = [[{"role": "user", "content": row}, {"role": "assistant", "content": row[::-1]}] for row in said]
    (folder / "a.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n\n" for one in turns))
    return {"files": f"{folder}/*.jsonl"}


def pairs(folder: Path) -> dict[str, Any]:
    said = [{"prompt": row, "chosen": row + "!", "rejected": row + "?"} for row in ROWS if row]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n\n" for one in said))
    return {"files": f"{folder}/*.jsonl"}


def mixture(folder: Path) -> dict[str, Any]:
    (folder / "own").mkdir()
    sources = {"texts": {"text": text(folder)}, "lines": {"jsonl": jsonl(folder / "own")}}
    return {"sources": sources, "weights": {"texts": 1, "lines": 2}}


def hub(folder: Path) -> dict[str, Any]:
    """A folder of files as the hub has them stands for a name there."""
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in ROWS))
    return {"dataset": str(folder)}


PARAMETERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "text": text,
    "jsonl": jsonl,
    "parquet": parquet,
    "hf": hf,
    "hub": hub,
    "chat": chat,
    "pairs": pairs,
    "mixture": mixture,
}


@pytest.fixture(params=names())
def source(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Source:
    """Every member of the room; one that takes parameters needs a maker of its input above."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    maker = PARAMETERS.get(request.param)
    made = build({request.param: maker(tmp_path) if maker else {}}, key="data.source")
    try:
        next(made.documents())
    except BadInput as error:
        if "pip install" in str(error):
            pytest.skip(str(error))
        raise
    return made


def test_documents_keep_order_and_names(source: Source) -> None:
    found = [*source.documents()]
    assert [*source.documents()] == found
    assert len({document.path for document in found}) == len(found) > 0
    assert all(document.text and document.path for document in found)
    assert all(document.data.decode() == document.text or source.whole for document in found)


def test_names_hold_on_any_machine(source: Source, tmp_path: Path) -> None:
    for document in source.documents():
        assert not document.path.startswith("/") and str(tmp_path) not in document.path and "\\" not in document.path


def test_the_manifest_is_stable_and_counts(source: Source) -> None:
    found = manifest(source)
    assert manifest(source) == found
    documents = [*source.documents()]
    assert found.documents == len(documents)
    assert found.bytes == sum(len(document.data) for document in documents)
    assert len(found.sha256) == 64 and 0 <= found.lowest <= found.highest < 1
    assert found.licence == source.licence and found.licence.strip()


def test_the_stamp_knows_every_file(source: Source) -> None:
    stamp = source.stamp()
    assert stamp == source.stamp() and stamp
    assert all(Path(file).is_file() and size >= 0 and modified_ns > 0 for file, size, modified_ns in stamp)
    assert sum(size for _, size, _ in stamp) > 0


def test_a_source_is_a_value(source: Source) -> None:
    assert hash(source) == hash(type(source)(**vars(source)))
