"""The tokenizer of a GGUF file: what llama.cpp reads, made from a tokenizer.json or refused by name.

llama.cpp runs a byte-level BPE if it knows how text is cut before it merges, which it takes by name
(`tokenizer.ggml.pre`, src/llama-vocab.cpp). A tokenizer that would cut, merge or normalize in another way there is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.spec.errors import BadInput, bad_input

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens, as numbered by llama.cpp
_DO = "export with --to hf, or train with byte, bpe:N or a byte-level BPE that llama.cpp knows"
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
_DIGITS = {"type": "Digits", "individual_digits": True}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}| ", r"|\p{N}{1,3}| ")
_BY_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")  # one and the same pair of expressions
_GPT2 = {**_LEVEL, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """The tokenizer fields of a GGUF file. `tokens`, `types`: one per token id; `merges`: "left right", best first.

    `special` holds ids by the name of their key without `_token_id` (bos, eos, ...); `notes` what differs in rare text.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    pre: str
    special: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    notes: tuple[str, ...]

    def fields(self) -> dict[str, Any]:
        """Return the fields by key; an empty list is a list of texts."""
        found: dict[str, Any] = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": self.pre,
            "tokenizer.ggml.tokens": list(self.tokens),
            "tokenizer.ggml.token_type": list(self.types),
            "tokenizer.ggml.merges": list(self.merges),
            **{f"tokenizer.ggml.{name}_token_id": index for name, index in self.special.items()},
            "tokenizer.ggml.add_bos_token": self.add_bos,
            "tokenizer.ggml.add_eos_token": self.add_eos,
        }
        if self.chat_template is not None:
            found["tokenizer.chat_template"] = self.chat_template
        return found


def read_vocabulary(files: Mapping[str, bytes], *, size: int, bos: int | None, eos: tuple[int, ...]) -> GgufVocabulary:
    """Return the vocabulary that llama.cpp reads for the tokenizer in `files` (by name, as transformers saves them).

    size: the token ids that the model takes; ids without a token become unused ones. bos, eos: the model's own ids, for
    where the tokenizer names none. Raises BadInput for a tokenizer that llama.cpp would not run alike.
    """
    read: dict[str, Any] = json.loads(files["tokenizer.json"])
    config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
    _check_plain(read)
    by_id = _tokens(read, size)
    merges = tuple(_merge(one) for one in read["model"].get("merges", ()))
    add_bos, add_eos, before = _added_around(read)
    special = _special(read, config, bos if before is None else before, eos)
    if before is not None:
        special["bos"] = before
    return GgufVocabulary(
        tokens=tuple(token for token, _ in by_id),
        types=tuple(kind for _, kind in by_id),
        merges=merges,
        pre=_pre(read, merges),
        special=special,
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template=_template(files, config),
        notes=tuple(_notes(read)),
    )


def with_pre_tokenizer(tokenizer_json: bytes, pre: str) -> bytes:
    """Return a tokenizer.json that cuts text as llama.cpp does under the name `pre`; unchanged for other names.

    transformers reads "smollm" and its kin as GPT-2's expression alone, without cutting digits apart first.
    """
    if pre not in _BY_DIGITS:
        return tokenizer_json
    read = json.loads(tokenizer_json)
    read["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [_DIGITS, _GPT2]}
    return json.dumps(read, ensure_ascii=False).encode()


def _refused(wanted: str, got: str) -> BadInput:
    return bad_input(wanted=f"a tokenizer that llama.cpp has an equal of: {wanted}", got=got, do=_DO)


def _check_plain(read: Mapping[str, Any]) -> None:
    """Refuse all but a byte-level BPE without options of its own."""
    model, decoder = read["model"], (read.get("decoder") or {}).get("type")
    if model.get("type", "BPE") != "BPE":
        raise _refused("a byte-level BPE", f"a {model['type']} model")
    if model.get("byte_fallback"):
        raise _refused("a byte-level BPE", "a BPE with byte_fallback (SentencePiece)")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise _refused("a plain BPE", f"one with {option} {model[option]!r}")
    if decoder != "ByteLevel":
        raise _refused("a ByteLevel decoder", f"the decoder {decoder}")
    if (normalizer := read.get("normalizer")) and normalizer.get("type") != "NFC":
        raise _refused("no normalizer", f"the normalizer {normalizer.get('type')}")
    for token in read.get("added_tokens", ()):
        for option in ("lstrip", "rstrip", "single_word"):
            if token.get(option):
                raise _refused("added tokens matched as they are", f"{token['content']!r} with {option}")


def _notes(read: Mapping[str, Any]) -> list[str]:
    """Return what llama.cpp does otherwise with rare text."""
    notes = []
    if (read.get("normalizer") or {}).get("type") == "NFC":
        notes.append("llama.cpp does not normalize: text that is not in Unicode's NFC gives other tokens there")
    vocabulary, unknown = read["model"]["vocab"], read["model"].get("unk_token")
    missing = [byte for byte in range(256) if byte not in _NOT_IN_UTF8 and byte_letter(byte) not in vocabulary]
    if missing and unknown is not None:
        notes.append(f"{len(missing)} bytes have no token: llama.cpp drops them, the tokenizer gives {unknown}")
    return notes


_NOT_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


def byte_letter(byte: int) -> str:
    """Return GPT-2's printable letter for a byte."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in prints else chr(256 + sum(1 for other in range(byte) if other not in prints))


def _tokens(read: Mapping[str, Any], size: int) -> list[tuple[str, int]]:
    """(text, type) of every id below `size`. Raises BadInput for ids beyond it."""
    found = {index: (text, NORMAL) for text, index in read["model"]["vocab"].items()}
    for token in read.get("added_tokens", ()):
        found[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    if found and max(found) >= size:
        raise bad_input(
            wanted=f"token ids below {size}, the model's vocabulary",
            got=f"a tokenizer with the id {max(found)}",
            do="export with the tokenizer that the model was trained with",
        )
    texts = {text for text, _ in found.values()}
    if len(texts) != len(found):
        raise _refused("one id for each token", f"{len(found)} ids of {len(texts)} tokens")
    return [found.get(index) or (_spare(index, texts), UNUSED) for index in range(size)]


def _spare(index: int, texts: set[str]) -> str:
    text = f"[PAD{index}]"
    while text in texts:
        text = f"[{text}]"
    return text


def _merge(written: Any) -> str:
    left, right = written.split(" ") if isinstance(written, str) else written
    if " " in left or " " in right:
        raise _refused("merges of byte letters", f"the merge {written!r}")
    return f"{left} {right}"


def _pre(read: Mapping[str, Any], merges: tuple[str, ...]) -> str:
    """Return llama.cpp's name for how the text is cut before it is merged."""
    written = read.get("pre_tokenizer") or {}
    steps = written.get("pretokenizers", ()) if written.get("type") == "Sequence" else (written,)
    cut = [_step(step) for step in steps]
    ignores = bool(read["model"].get("ignore_merges"))  # llama.cpp does so under llama-bpe alone
    level = ["bytes"]
    if not merges and cut == level and not ignores:
        return "gpt-2"  # wherever it is cut, bytes stay bytes
    known = {
        "gpt-2": ["gpt-2"],
        "smollm": ["digits", "gpt-2"],
        "qwen2": [_QWEN2, *level],
        "llama-bpe": [_LLAMA3, *level],
    }
    for name, steps_of in known.items():
        if cut == steps_of and ignores == (name == "llama-bpe"):
            return name
    ignored = ", with ignore_merges" if ignores else ""
    raise _refused(f"a pre-tokenizer among {', '.join(known)}", f"{json.dumps(written)[:300]}{ignored}")


def _step(step: Mapping[str, Any]) -> str:
    """Return a short name of one step of a pre-tokenizer, or the expression that it splits by."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space", True):
        return "gpt-2" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str(step.get("pattern", {}).get("Regex"))
    return json.dumps(step)


def _added_around(read: Mapping[str, Any]) -> tuple[bool, bool, int | None]:
    """Whether a token is added before and after a text, and the id of the first."""
    ids = {token["content"]: token["id"] for token in read.get("added_tokens", ())}
    before: list[str] = []
    after: list[str] = []
    written = read.get("post_processor") or {}
    for step in written.get("processors", ()) if written.get("type") == "Sequence" else (written,):
        if step.get("type") in (None, "ByteLevel"):
            continue
        if step["type"] != "TemplateProcessing":
            raise _refused("a TemplateProcessing post-processor", f"a {step['type']}")
        around = before
        for piece in step["single"]:
            if "Sequence" in piece:
                around = after
            else:
                around.append(piece["SpecialToken"]["id"])
    if len(before) > 1 or len(after) > 1:
        raise _refused("at most one token before and after a text", f"{before + after}")
    return bool(before), bool(after), ids[before[0]] if before else None


def _special(
    read: Mapping[str, Any], config: Mapping[str, Any], bos: int | None, eos: tuple[int, ...]
) -> dict[str, int]:
    """Return the ids of special tokens by their name in GGUF: those the tokenizer names, else the model's own."""
    ids = {**read["model"]["vocab"], **{token["content"]: token["id"] for token in read.get("added_tokens", ())}}
    found: dict[str, int] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        text = config.get(f"{key}_token")
        text = text.get("content") if isinstance(text, dict) else text
        if text in ids:
            found[name] = ids[text]
    if "eos" not in found and eos:
        found["eos"] = eos[0]
    if "bos" not in found and (first := bos if bos is not None else found.get("eos")) is not None:
        found["bos"] = first  # otherwise llama.cpp takes id 11
    others = [one for one in eos if one != found.get("eos")]
    return {**found, **({"eot": others[0]} if others else {})}


def _template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """Return the chat template: the file's, else the configuration's (the one named "default" of several)."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    written = config.get("chat_template")
    if isinstance(written, list):
        return next((str(one["template"]) for one in written if one.get("name") == "default"), None)
    return str(written) if written is not None else None
