"""Chat files and templates for tests: the jinja of three kinds of models, and a tokenizer with their marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n"
    "{{ '<|assistant|>' }}\n"
    "{% endif %}\n"
    "{% endfor %}"
)
MARKS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "zephyr": ["<s>", "</s>"],
}
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "zephyr": ZEPHYR}
BORDERS = {"chatml": ("", "<|im_end|>"), "llama3": ("<|begin_of_text|>", "<|eot_id|>"), "zephyr": ("<s>", "</s>")}


def turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    said = [{"role": "system", "content": system}] if system else []
    return said + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def chat_file(file: Path, *conversations: list[dict[str, str]]) -> Path:
    """Write conversations in the dialect of messages."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    return file


def tokenizer_folder(folder: Path, kind: str) -> Path:
    """A byte-level tokenizer of one token per byte, with the marks and the template of a kind of model."""
    from gossamer.data.tokenizer._bytes import Bytes

    folder.mkdir(parents=True, exist_ok=True)
    Bytes().save(folder)
    said: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    plain = said["added_tokens"][0]
    for number, mark in enumerate(MARKS[kind]):
        said["added_tokens"].append({**plain, "id": 257 + number, "content": mark})
        said["model"]["vocab"][mark] = 257 + number
    (folder / "tokenizer.json").write_text(json.dumps(said))
    bos, eos = BORDERS[kind]
    config = {"bos_token": bos or None, "eos_token": eos, "chat_template": TEMPLATES[kind]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
