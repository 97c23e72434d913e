"""What is compared of a teacher: its tokens, vocabulary, length, size, blocks, and a digest of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import nn

from gossamer.job.found_teacher import FoundTeacher
from gossamer.model.input_checks import check_sequence
from gossamer.model.text_stream import TextCoder
from gossamer.run.hidden_states import blocks_of
from gossamer.run.parts import Parts
from gossamer.run.remote_teacher.messages import Facts
from gossamer.run.teacher import check_widths
from gossamer.saver.head.cut_head import head_of
from gossamer.spec import records
from gossamer.spec.errors import BadInput, bad_input

_KEY = "train.loss"
_DIGESTS = 1 << 48
_PROBE = 'def mean(xs):\n    """Return the mean."""\n    return sum(xs) / len(xs)  # 0.5 Zwölf, 数学\n'


def check_same(digests: Sequence[float], written: str) -> None:
    """Raise BadInput where ranks have different teachers; those without one have 0."""
    if len(found := {one for one in digests if one}) > 1:
        told = ", ".join(f"{int(one):012x} on rank {digests.index(one)}" for one in sorted(found))
        do = "put the same weights at that place on all hosts, or name an address that means one host to all of them"
        raise bad_input(wanted="one teacher on all ranks", got=f"{told} at {written}", do=do, key=_KEY)


def teacher_event(level: Literal["info", "warning"], said: str) -> records.Event:
    """Return the record of what is to be said about a teacher."""
    return records.Event(level=level, message=f"teacher: {said}")


def facts_of(found: FoundTeacher, digest: float = 0.0) -> Facts:
    """Return what is compared of a teacher. `digest`: of its weights, where somebody compares it."""
    coder, blocks, without_blocks = found.tokenizer, tuple[str, ...](), ""
    try:
        blocks = blocks_of(found.module, "the teacher")
    except BadInput as error:
        without_blocks = error.message
    return Facts(
        parameters=count_parameters(found.module),
        positions=found.positions,
        width=_width(found.module),
        tokens=None if coder is None else tuple(int(one) for one in coder.encode(_PROBE)),
        without=found.without,
        digest=f"{int(digest):012x}",
        blocks=blocks,
        without_blocks=without_blocks,
    )


def compared(facts: Facts, parts: Parts) -> tuple[int | None, list[records.Event]]:
    """Compare a teacher with the student and its data; return the logits that count (None: all), and remarks.

    Raises BadInput for other tokens, another vocabulary, or a teacher that sees fewer tokens than the data has.
    """
    remarks = list[records.Event]()
    if parts.words is not None:
        check_sequence(facts.positions, parts.config.data.sequence)
        if facts.tokens is not None:
            _check_tokens(facts.tokens, parts.words)
        else:
            said = f"{facts.without}, so that nothing has checked whether its tokens are those of the data"
            remarks.append(teacher_event("warning", said))
    words, ours, theirs = None, _width(parts.outline), facts.width
    if ours is not None and theirs is not None and ours != theirs:
        known = getattr(parts.words, "vocabulary", None)
        if facts.tokens is None or known is None or known > min(ours, theirs):
            check_widths(ours, theirs)
        words = known
        said = f"it gives {theirs:,} logits and the student {ours:,}: those of the {known:,} tokens count, the others "
        remarks.append(teacher_event("info", said + "are padding"))
    theirs_all, ours_all = facts.parameters, count_parameters(parts.outline)
    if ours_all > theirs_all:
        said = f"it has {theirs_all:,} parameters, fewer than the student ({ours_all:,}): a smaller teacher is seldom "
        remarks.append(teacher_event("warning", said + "the better model"))
    return words, remarks


def count_parameters(module: nn.Module) -> int:
    """Return how many numbers a model's parameters are."""
    return sum(one.numel() for one in module.parameters())


def _check_tokens(theirs: Sequence[int], ours: TextCoder) -> None:
    first, second = list(theirs), [int(one) for one in ours.encode(_PROBE)]
    if first != second:
        at = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        raise bad_input(
            wanted="a teacher whose tokenizer gives the tokens of the data",
            got=f"{first[at : at + 4]} where the data has {second[at : at + 4]}, from token {at} of a text on",
            do="set data.tokenizer to hf:TEACHER, and give the student its vocabulary",
            key=_KEY,
        )


def _width(module: nn.Module) -> int | None:
    """Return the number of a model's logits, where its head is one linear module."""
    try:
        return (
            int(head_of(module)[1].weight.shape[0])
            if callable(getattr(module, "get_output_embeddings", None))
            else None
        )
    except BadInput:
        return None


def digest_of(module: nn.Module, names: Collection[str] | None = None) -> float:
    """Return 48 bits of a hash of all weights, or of those with these names.

    It is the sum of one hash for each tensor, modulo 2^48: that of a whole model is the sum of those of its parts.
    """
    found = 0
    for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        if names is None or name in names:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            one = hashlib.sha256(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            one.update(data.numpy().data)
            found += int.from_bytes(one.digest()[:6], "big")
    return float(found % _DIGESTS)


def joined_digest(first: float, second: float) -> float:
    """Return the digest of all weights of two parts of a model, of those of each."""
    return float((int(first) + int(second)) % _DIGESTS)
