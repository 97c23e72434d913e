"""The names and sizes of the files of a run's text, kept with it, so that a resume can name those that changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gossamer.data import Corpus
from gossamer.data.cache import read_json, write_json
from gossamer.spec.errors import BadInput

_MOST = 10_000  # files whose names are kept; of more, none are
_SHOWN = 3  # names in a message


def keep_data_files(file: Path, corpus: Corpus) -> None:
    """Write the names and sizes of the text's files, unless `file` exists. Raises BadInput, e.g. on a full disk."""
    sizes = _sizes(corpus)
    if file.exists() or not 0 < len(sizes) <= _MOST:
        return
    write_json(file, {"fingerprint": corpus.fingerprint, "files": sizes})


def check_data_files(file: Path, corpus: Corpus) -> None:
    """Raise BadInput that names the files of the text which are new, missing or of another size since the run began.

    Another fingerprint without such a file (same sizes, another tokenizer) is left to the checkpoint's own check.
    """
    began = read_json(file)
    if began is None or began.get("fingerprint") == corpus.fingerprint:
        return
    before, now = began.get("files"), _sizes(corpus)
    if not isinstance(before, dict) or not now or not (told := _differences(before, now)):
        return
    raise BadInput(
        f"the training text has changed since the run began: {told}. The order of the samples would change: "
        "restore the text, or start a new run",
        key="data.source",
    )


def _sizes(corpus: Corpus) -> dict[str, int]:
    """Return name -> bytes of the text's files; names are relative to the folder that holds all of them."""
    if not corpus.files:
        return {}
    root = os.path.commonpath([os.path.dirname(path) for path, _, _ in corpus.files])
    return {os.path.relpath(path, root): size for path, size, _ in corpus.files}


def _differences(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Return the difference of two sets of files as text; "" for none, and for sets that have no name in common."""
    if not before.keys() & now.keys():
        return ""
    kinds = {
        "new": sorted(now.keys() - before.keys()),
        "missing": sorted(before.keys() - now.keys()),
        "of another size": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
    }
    return "; ".join(_listed(names, kind) for kind, names in kinds.items() if names)


def _listed(names: list[str], kind: str) -> str:
    count = "1 file is" if len(names) == 1 else f"{len(names)} files are"
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{count} {kind} ({', '.join(names[:_SHOWN])}{more})"
