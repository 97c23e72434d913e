"""The files from which transformers loads a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from gossamer.data.cache import write_file
from gossamer.data.chat_template import ChatTemplate

SEPARATOR = "<|endoftext|>"


def write_files(
    directory: Path, tokenizer_json: str, *, separator: str, template: ChatTemplate | None = None
) -> tuple[Path, ...]:
    """Write `tokenizer.json`, the `tokenizer_config.json` that names the separator, and the files of a chat template.

    Return their paths.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": separator,
        "pad_token": separator,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer.json": tokenizer_json.encode("utf-8"),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode("utf-8"),
        **(template.files() if template is not None else {}),
    }
    for name, content in files.items():
        write_file(directory / name, content)
    return tuple(directory / name for name in files)
