from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.data import IGNORED, Corpus, decode_preview, open_corpus, valid_labels

TEXTS = ["abc", "defghijkl", "m", "nopqrstuvwxyz" * 3]
SEPARATOR = 256


def corpus_of(folder: Path, texts: list[str], **settings: object) -> Corpus:
    (folder / "in").mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / "in" / f"{number}.txt").write_bytes(text.encode())
    return open_corpus(source=f"text:{folder}/in/*", validation=0, cache=folder / "cache", **settings)  # type: ignore[arg-type]


def stream_of(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    tokens = [token for text in texts for token in (*text.encode(), SEPARATOR)]
    begins = [place == 0 for text in texts for place in range(len(text.encode()) + 1)]
    return np.array(tokens), np.array(begins)


@pytest.mark.parametrize("sequence", [2, 3, 7, 8, 50])
def test_packed_windows_are_the_stream(tmp_path: Path, sequence: int) -> None:
    train = corpus_of(tmp_path, TEXTS, sequence=sequence).train
    tokens, begins = stream_of(TEXTS)
    assert len(train) == (tokens.size - 1) // (sequence - 1)
    batch = train.batch(range(len(train)))
    assert set(batch) == {"input_ids", "labels"}
    assert all(part.dtype == torch.int64 and part.shape == (len(train), sequence) for part in batch.values())
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        at = np.arange(sequence) + row * (sequence - 1)
        assert np.array_equal(ids, tokens[at])
        wanted = np.where(begins[at] | (np.arange(sequence) == 0), IGNORED, tokens[at])
        assert np.array_equal(labels, wanted)


@pytest.mark.parametrize("sequence", [2, 5, 64])
def test_documents_in_chunks_with_padding_on_the_right(tmp_path: Path, sequence: int) -> None:
    train = corpus_of(tmp_path, TEXTS, sequence=sequence, pack=False).train
    batch = train.batch(range(len(train)))
    rebuilt: list[int] = []
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        real = int(mask.sum())
        assert real >= 2 and mask[:real].all() and (ids[real:] == SEPARATOR).all() and (labels[real:] == IGNORED).all()
        assert labels[0] == IGNORED and torch.equal(labels[1:real], ids[1:real])
        if not rebuilt or rebuilt[-1] == SEPARATOR:
            rebuilt.append(int(ids[0]))  # the first token of a document is no label of any sequence
        rebuilt += ids[1:real].tolist()
    assert rebuilt == stream_of(TEXTS)[0].tolist()


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("isolate", [True, False])
def test_weights_and_bytes_agree_with_the_batch(tmp_path: Path, pack: bool, isolate: bool) -> None:
    train = corpus_of(tmp_path, TEXTS, sequence=6, pack=pack, isolate=isolate).train
    rows = [*range(len(train)), 0, 2]  # any order, repeats allowed
    batch = train.batch(rows)
    assert int(valid_labels(batch["labels"])) == int(train.labels_of(rows).sum())
    spoken = batch["labels"][(batch["labels"] != IGNORED) & (batch["labels"] != SEPARATOR)]
    assert train.bytes_of(rows) == spoken.numel() > 0
    assert train.bytes_of(rows) == sum(train.bytes_of([row]) for row in rows)
    for row, weight in zip(rows, train.labels_of(rows), strict=True):
        assert int(valid_labels(train.batch([row])["labels"])) == weight
    assert train.bytes_of([]) == 0 and train.batch([])["labels"].shape == (0, 6)


def test_isolated_positions_restart_at_documents(tmp_path: Path) -> None:
    train = corpus_of(tmp_path, ["abc", "de", "fghijklmno"], sequence=6, isolate=True).train
    found = train.batch(range(len(train)))["position_ids"].tolist()
    # abc| de|f, fghijk, klmno|: windows of six overlapping by one
    assert found == [[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def test_indices_out_of_range_are_refused(tmp_path: Path) -> None:
    train = corpus_of(tmp_path, TEXTS, sequence=6).train
    for index in (-1, len(train)):
        with pytest.raises(AssertionError, match="no such sequences"):
            train.batch([index])


def test_preview_shows_what_is_trained_on(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, TEXTS, sequence=8, pack=False)
    shown = decode_preview(corpus.train, corpus.tokenizer, seed=1)
    assert len(shown) == 3 and len({one.index for one in shown}) == 3
    for one in shown:
        assert one.text and any(one.text in text for text in TEXTS)
        assert one.labels == one.tokens - 1 and one.bytes in (one.labels, one.labels - 1)
