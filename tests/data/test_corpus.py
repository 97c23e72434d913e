import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gossamer.data import corpus_part as corpus_module
from gossamer.data import open_corpus
from gossamer.data.manifest import Holdout, manifest, place
from gossamer.data.source import parse_source
from gossamer.spec.errors import BadInput


def tensors_hash(split: object) -> str:
    batch = split.batch(range(len(split)))  # type: ignore[attr-defined, arg-type]
    return hashlib.sha256(b"".join(batch[name].numpy().tobytes() for name in sorted(batch))).hexdigest()[:16]


GOLDEN = {
    "corpus": "235c726f529d2238",
    "train": "61083f167eb34fa2",
    "validation": "e8a96d29fbe3efcc",
    "train_documents": "0be0a0d67745a362",
}


def test_golden(frozen: Path, cache: Path) -> None:
    """Rewrite GOLDEN only together with the format number: the same text must give the same sequences for ever."""
    packed = open_corpus(source=f"text:{frozen}/**/*.txt", sequence=128, cache=cache, validation=0.2)
    apart = open_corpus(source=f"text:{frozen}/**/*.txt", sequence=128, cache=cache, validation=0.2, pack=False)
    assert packed.fingerprint == apart.fingerprint  # the same tokens in the cache, cut in two ways
    assert {
        "corpus": packed.fingerprint[:16],
        "train": tensors_hash(packed.train),
        "validation": tensors_hash(packed.validation),
        "train_documents": tensors_hash(apart.train),
    } == GOLDEN


def test_the_split_is_by_file_and_leaks_nothing(frozen: Path, cache: Path) -> None:
    pattern = f"text:{frozen}/**/*.txt"
    corpus = open_corpus(source=pattern, sequence=64, cache=cache, validation=0.3)
    documents = {document.path: document.text for document in parse_source(pattern).documents()}
    held_out = {path for path in documents if place(path) < 0.3}
    assert 0 < len(held_out) < len(documents)
    wanted = {True: "", False: ""}
    for path, text in documents.items():
        wanted[path in held_out] += text
    assert corpus.text("validation").decode() == wanted[True] and corpus.text("train").decode() == wanted[False]


def test_a_file_keeps_its_side_when_others_come_and_go(frozen: Path) -> None:
    def sides() -> tuple[set[str], set[str]]:
        source = parse_source(f"text:{frozen}/**/*.txt")
        holdout = Holdout.of(manifest(source), 0.3)
        return set(holdout.texts(source, "train")), set(holdout.texts(source, "validation"))

    train, held_out = sides()
    assert train and held_out and not train & held_out
    for number in range(20):
        (frozen / f"more{number}.txt").write_text(f"more {number}")
    for file in sorted(frozen.rglob("*.txt"))[::5]:
        file.unlink()
    train_after, held_out_after = sides()
    assert not train & held_out_after and not held_out & train_after
    assert train & train_after and held_out & held_out_after


def test_one_document_gives_its_tail(tmp_path: Path, cache: Path) -> None:
    text = "".join(f"line {n} \u00e9\n" for n in range(500))
    (tmp_path / "one.txt").write_bytes(text.encode())
    corpus = open_corpus(source=f"text:{tmp_path}/one.txt", sequence=16, cache=cache, validation=0.1)
    train, held_out = corpus.text("train").decode(), corpus.text("validation").decode()
    assert train + held_out == text and len(held_out) == round(len(text) * 0.1)
    assert corpus.manifest["holdout"] == {"fraction": 0.1, "by": "tail"}


def test_few_documents_all_on_one_side_give_their_tails(tmp_path: Path, cache: Path) -> None:
    texts = {}
    for name in ("a", "b", "c"):
        texts[name] = "".join(f"{name}{n} " for n in range(200))
        (tmp_path / f"{name}.txt").write_text(texts[name])
    assert all(place(f"{name}.txt") >= 0.05 for name in texts)
    corpus = open_corpus(source=f"text:{tmp_path}/*.txt", sequence=16, cache=cache)
    assert corpus.manifest["holdout"]["by"] == "tail"
    tails = "".join(text[len(text) - round(len(text) * 0.05) :] for text in texts.values())
    assert corpus.text("validation").decode() == tails


def test_no_validation(frozen: Path, cache: Path) -> None:
    corpus = open_corpus(source=f"text:{frozen}/**/*.txt", sequence=64, cache=cache, validation=0)
    assert len(corpus.validation) == 0 and corpus.validation.batch([])["labels"].shape == (0, 64)
    assert corpus.manifest["train"]["documents"] == 24 and corpus.text("validation") == b""


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_bytes_are_counted_exactly(frozen: Path, cache: Path, tokenizer: str, pack: bool) -> None:
    """All bytes but those of first tokens of documents, and of what the last window of the stream leaves out."""
    settings = {"source": f"text:{frozen}/**/*.txt", "tokenizer": tokenizer, "sequence": 32, "pack": pack}
    corpus = open_corpus(**settings, cache=cache, validation=0.2)  # type: ignore[arg-type]
    total = 0
    for side, split in (("train", corpus.train), ("validation", corpus.validation)):
        stream = split.stream
        assert stream.bytes == corpus.manifest[side]["bytes"] == len(corpus.text(side))  # type: ignore[arg-type]
        total += stream.bytes
        used = len(split) * 31 + 1 if pack else stream.tokens.size
        starts = stream.starts[stream.starts < used]
        wanted = int(stream.lengths[:used].sum()) - int(stream.lengths[starts].sum())
        assert split.bytes_of(range(len(split))) == wanted
        assert int(split.labels_of(range(len(split))).sum()) == used - starts.size
    assert total == sum(file.stat().st_size for file in frozen.rglob("*.txt"))


def test_a_second_opening_tokenizes_nothing(frozen: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"source": f"text:{frozen}/**/*.txt", "tokenizer": "bpe:280", "cache": cache, "validation": 0.2}
    first = open_corpus(**settings, sequence=64)  # type: ignore[arg-type]
    monkeypatch.setattr(corpus_module, "write_stream", lambda *_, **__: pytest.fail("tokenized again"))
    again = open_corpus(**settings, sequence=64)  # type: ignore[arg-type]
    assert again.fingerprint == first.fingerprint and again.train.fingerprint == first.train.fingerprint
    assert tensors_hash(again.train) == tensors_hash(first.train)
    other = open_corpus(**settings, sequence=32)  # type: ignore[arg-type]
    assert other.fingerprint == first.fingerprint and other.train.fingerprint != first.train.fingerprint


def test_changed_text_is_noticed(frozen: Path, cache: Path) -> None:
    settings = {"source": f"text:{frozen}/**/*.txt", "sequence": 64, "cache": cache, "validation": 0.2}
    first = open_corpus(**settings)  # type: ignore[arg-type]
    file = next(iter(sorted(frozen.rglob("*.txt"))))
    file.write_bytes(file.read_bytes().replace(b"d", b"D", 1))  # the same size, within the clock's grain
    assert open_corpus(**settings).fingerprint != first.fingerprint  # type: ignore[arg-type]


def test_old_files_are_not_read_again_until_touched(frozen: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in frozen.rglob("*.txt"):
        os.utime(file, (time.time() - 60, time.time() - 60))
    settings = {"source": f"text:{frozen}/**/*.txt", "sequence": 64, "cache": cache, "validation": 0.2}
    first = open_corpus(**settings)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", _only_json(Path.read_bytes))
        assert open_corpus(**settings).fingerprint == first.fingerprint  # type: ignore[arg-type]
    file.write_bytes(b"x" * file.stat().st_size)
    assert open_corpus(**settings).fingerprint != first.fingerprint  # type: ignore[arg-type]


def _only_json(read: object) -> object:
    def reads(self: Path) -> bytes:
        assert self.suffix == ".json", f"{self} was read again"
        return read(self)  # type: ignore[operator, no-any-return]

    return reads


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_a_damaged_cache_is_made_again(frozen: Path, cache: Path, damage: str) -> None:
    settings = {"source": f"text:{frozen}/**/*.txt", "sequence": 64, "cache": cache, "validation": 0.2}
    first = tensors_hash(open_corpus(**settings).train)  # type: ignore[arg-type]
    (tokens,) = cache.glob("corpora/*/train.tokens")
    if damage == "truncate":
        os.truncate(tokens, tokens.stat().st_size - 2)
    elif damage == "remove":
        tokens.unlink()
    else:
        (tokens.parent / "manifest.json").write_text("{")
    assert tensors_hash(open_corpus(**settings).train) == first  # type: ignore[arg-type]


def test_nothing_half_made_stays_behind(frozen: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus_module, "write_json", full)
    with pytest.raises(BadInput, match=r"data\.cache: cannot write the cache .*No space left"):
        open_corpus(source=f"text:{frozen}/**/*.txt", sequence=64, cache=cache, validation=0.2)
    assert [file.name for file in (cache / "corpora").iterdir() if file.suffix != ".lock"] == []


RACE = """
import sys, time, pathlib, json
from gossamer.data import open_corpus
folder, ready, go = map(pathlib.Path, sys.argv[1:4])
ready.touch()
while not go.exists():
    time.sleep(0.001)
settings = dict(source=f"text:{folder}/**/*.txt", tokenizer="bpe:300", sequence=64, validation=0.2)
found = open_corpus(**settings, cache=folder.parent / "cache")
print(json.dumps([found.fingerprint, found.train.batch([3])["labels"].tolist()]))
"""


@pytest.mark.slow
def test_processes_that_start_at_once_agree(frozen: Path, tmp_path: Path) -> None:
    gates = [tmp_path / f"ready{n}" for n in range(3)]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(frozen), str(gate), str(tmp_path / "go")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for gate in gates
    ]
    try:
        while not all(gate.exists() for gate in gates):
            assert all(racer.poll() is None for racer in racers)
            time.sleep(0.01)
        (tmp_path / "go").touch()
        told = [racer.communicate(timeout=60)[0] for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert all(racer.returncode == 0 for racer in racers) and len(set(told)) == 1
    alone = open_corpus(
        source=f"text:{frozen}/**/*.txt", tokenizer="bpe:300", sequence=64, cache=tmp_path / "alone", validation=0.2
    )
    assert json.loads(told[0]) == [alone.fingerprint, alone.train.batch([3])["labels"].tolist()]
    kept = [file for file in (tmp_path / "cache").rglob("*") if file.name.startswith(".")]
    assert kept == []


def test_too_little_text(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(
        BadInput, match=r"data\.sequence: wanted at least 256 tokens in the train text.*got 96 \(95 bytes in 1"
    ):
        open_corpus(source=f"text:{tmp_path}/a.txt", cache=cache)
    with pytest.raises(BadInput, match=r"validation text.*got 6 \(5 bytes.*set data\.validation higher"):
        open_corpus(source=f"text:{tmp_path}/a.txt", sequence=64, cache=cache)
    assert len(open_corpus(source=f"text:{tmp_path}/a.txt", sequence=64, cache=cache, validation=0).train) == 1
    assert len(open_corpus(source=f"text:{tmp_path}/a.txt", sequence=64, cache=cache, pack=False).train) == 2


def test_an_empty_corpus(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(BadInput, match=r"data\.source: the corpus is empty.*0 bytes") as error:
        open_corpus(source=f"text:{tmp_path}/*.txt", cache=cache)
    assert f"text:{tmp_path}/*.txt (2 files, the first is {tmp_path}/a.txt)" in str(error.value)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, float("nan")])
def test_impossible_fractions(frozen: Path, cache: Path, value: float) -> None:
    with pytest.raises(BadInput, match=r"data\.validation: wanted a fraction"):
        open_corpus(source=f"text:{frozen}/**/*.txt", cache=cache, validation=value)


def test_impossible_sequence(frozen: Path, cache: Path) -> None:
    with pytest.raises(BadInput, match=r"data\.sequence: wanted at least 2"):
        open_corpus(source=f"text:{frozen}/**/*.txt", cache=cache, sequence=1)


def test_a_cache_that_cannot_be_written(frozen: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"data\.cache: wanted to write .*set data\.cache"):
        open_corpus(source=f"text:{frozen}/**/*.txt", cache=tmp_path / "file" / "x")


def test_the_usual_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.data.cache import default_cache

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "gossamer"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says: ignore it
    assert default_cache() == Path.home() / ".cache" / "gossamer"


def test_text_that_changes_while_it_is_read(frozen: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = manifest(parse_source(f"text:{frozen}/**/*.txt"))
    monkeypatch.setattr(corpus_module, "cached_manifest", lambda *_, **__: found)
    next(frozen.rglob("*.txt")).write_text("now something else")
    with pytest.raises(BadInput, match="the corpus changed while it was read"):
        open_corpus(source=f"text:{frozen}/**/*.txt", sequence=64, cache=cache, validation=0.2)


def test_large_vocabularies_take_wider_tokens() -> None:
    from gossamer.data.stream import token_type
    from gossamer.data.tokenizer._fast import Fast

    for vocabulary, kind in ((65536, "uint16"), (65537, "uint32")):
        assert token_type(Fast(vocabulary=vocabulary, separator=0, fingerprint="", inner=None)) == kind


def test_holdout_needs_both_sides_by_hash(frozen: Path) -> None:
    found = manifest(parse_source(f"text:{frozen}/**/*.txt"))
    assert Holdout.of(found, found.lowest).by == "tail"  # nothing lies below the lowest
    assert Holdout.of(found, found.lowest + 1e-9).by == "hash"
    assert Holdout.of(found, found.highest).by == "hash"
    assert Holdout.of(found, min(0.9999999, found.highest + 1e-9)).by == "tail"
