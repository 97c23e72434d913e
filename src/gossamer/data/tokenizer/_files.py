"""The two files from which transformers loads a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from gossamer.data.cache import write_file

SEPARATOR = "<|endoftext|>"


def write_files(directory: Path, tokenizer_json: str, *, separator: str) -> tuple[Path, ...]:
    """Write `tokenizer.json` and the `tokenizer_config.json` that names the separator; return their paths."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": separator,
        "pad_token": separator,
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer.json": tokenizer_json, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    for name, text in files.items():
        write_file(directory / name, text.encode("utf-8"))
    return tuple(directory / name for name in files)
