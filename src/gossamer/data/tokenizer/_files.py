"""The files from which transformers loads a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from gossamer.data.cache import write_file
from gossamer.data.chat_template import ChatTemplate

SEPARATOR = "<|endoftext|>"
TEMPLATE = "chat_template.jinja"


def write_files(
    directory: Path, tokenizer_json: str, *, separator: str, template: ChatTemplate | None
) -> tuple[Path, ...]:
    """Write `tokenizer.json`, the `tokenizer_config.json` that names the separator, and a chat template where there is
    one; return their paths.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": separator,
        "pad_token": separator,
        "clean_up_tokenization_spaces": False,
    }
    if template is not None and template.bos_token:
        config["bos_token"] = template.bos_token
    files = {"tokenizer.json": tokenizer_json, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    if template is not None:
        files[TEMPLATE] = template.source
    for name, text in files.items():
        write_file(directory / name, text.encode("utf-8"))
    return tuple(directory / name for name in files)
