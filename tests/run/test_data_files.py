"""The names and sizes of a text's files: a resume on another text names the files that differ."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gossamer.data import Corpus
from gossamer.job.data_files import check_data_files, keep_data_files
from gossamer.job.training_data import corpus_of
from gossamer.spec.config import DataSection
from gossamer.spec.errors import BadInput


def corpus_in(folder: Path) -> Corpus:
    data = DataSection(source=f"text:{folder}/**/*.txt", sequence=8, cache=str(folder.parent / "cache"))
    return corpus_of(data)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for name in ("a", "b", "c", "deep/d"):
        (folder / f"{name}.txt").write_text(f"the text of {name}, so many times over " * 8)
    return folder


def test_files_that_are_new_missing_or_changed_are_named(text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "data.json"
    keep_data_files(kept, corpus_in(text))
    check_data_files(kept, corpus_in(text))
    (text / "new.txt").write_text("a text that nobody had")
    (text / "a.txt").unlink()
    (text / "deep" / "d.txt").write_text("longer or shorter, but not of that size " * 9)
    with pytest.raises(BadInput, match=r"^data\.source: the training text has changed since the run began") as error:
        check_data_files(kept, corpus_in(text))
    assert (
        "1 file is new (new.txt); 1 file is missing (a.txt); 1 file is of another size (deep/d.txt)"
        in error.value.message
    )
    before = kept.read_bytes()
    keep_data_files(kept, corpus_in(text))
    assert kept.read_bytes() == before, "it says what the run began with"


def test_many_files_are_counted(text: Path, tmp_path: Path) -> None:
    keep_data_files(tmp_path / "data.json", corpus_in(text))
    for n in range(5):
        (text / f"n{n}.txt").write_text("more")
    with pytest.raises(BadInput, match=r"5 files are new \(n0\.txt, n1\.txt, n2\.txt, \.\.\.\)"):
        check_data_files(tmp_path / "data.json", corpus_in(text))


def test_the_same_text_elsewhere_is_the_same(text: Path, tmp_path: Path) -> None:
    keep_data_files(tmp_path / "data.json", corpus_in(text))
    shutil.copytree(text, tmp_path / "else" / "where")
    check_data_files(tmp_path / "data.json", corpus_in(tmp_path / "else" / "where"))


def test_what_no_name_tells_apart_is_left_to_the_checkpoint(text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "data.json"
    check_data_files(kept, corpus_in(text))  # a run of an earlier version
    keep_data_files(kept, corpus_in(text))
    raw = (text / "b.txt").read_text()
    (text / "b.txt").write_text(raw.upper())  # another text of this size
    check_data_files(kept, corpus_in(text))
    kept.write_text("{")
    check_data_files(kept, corpus_in(text))
