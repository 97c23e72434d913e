"""The states of a teacher's blocks, as they are sent: a row for each label that counts, in the type of the block.

A block is read by a hook while the forward of one question runs, so that no other student's question keeps its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.run.hidden_states import MASK, BlockTaps, TeacherStates, token_rows
from gossamer.run.remote_teacher.messages import BlockState, Facts, Terms
from gossamer.spec.errors import WireMismatch, bad_input
from gossamer.spec.units import show_bytes

VALID = "loss.rows"
_MOST_BYTES = 1 << 31  # of the states of one question
_KEY = "train.loss.hidden"
States = Mapping[str, Tensor]  # rows (n, E) by the path of a block


def check_blocks(terms: Terms, facts: Facts) -> None:
    """Raise BadInput for blocks that a teacher does not have, with the names of those that it has."""
    if strange := [one for one in terms.blocks if one not in facts.blocks]:
        raise bad_input(
            wanted=f"blocks of the teacher: {', '.join(facts.blocks) or 'it has none whose states could be sent'}",
            got=", ".join(strange),
            do="name some of these, or use the distillation of outputs alone",
            key=_KEY,
        )


def asked_beside(terms: Terms, example: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return what of a batch the states need, beside what the forward reads: the mask, for the mean over tokens."""
    return (MASK,) if terms.blocks and terms.dims == 2 and MASK in example else ()


@contextmanager
def tapped(module: nn.Module, blocks: Sequence[str]) -> Iterator[BlockTaps]:
    """Hold the outputs of these blocks in the forwards of this context."""
    taps = BlockTaps.on("of the teacher", module, blocks)
    try:
        yield taps
    finally:
        taps.remove()


def rows_of(taps: BlockTaps, terms: Terms, batch: Mapping[str, Tensor]) -> States:
    """Return the rows of the blocks that were tapped, of the labels that count. `batch`: the question.

    Raises BadInput for states of other shapes, or of more bytes than are sent for a question.
    """
    found = dict[str, Tensor]()
    for path, state in taps.taken().items():
        labels = state.shape[:2] if terms.dims > 2 else state.shape[:1]
        mask = batch[MASK].to(state.device) if terms.dims == 2 and MASK in batch else None
        rows = token_rows(state, labels, mask, f"{path} of the teacher")
        valid = counted(batch, len(rows))
        found[path] = rows if valid is None else rows[valid.to(rows.device)]
    if (size := sum(one.nbytes for one in found.values())) > _MOST_BYTES:
        raise bad_input(
            wanted=f"states of at most {show_bytes(_MOST_BYTES)} for a micro-batch",
            got=f"{show_bytes(size)} of {len(found)} blocks",
            do="set pairs to a smaller number, or raise train.accumulate",
            key=_KEY,
        )
    return found


def counted(batch: Mapping[str, Tensor], count: int) -> Tensor | None:
    """Return the numbers of those of `count` labels that count in a question; None for all.

    Raises WireMismatch for bits of another number of labels.
    """
    if (bits := batch.get(VALID)) is None:
        return None
    if bits.dtype is not torch.uint8 or bits.ndim != 1 or bits.numel() != -(-count // 8):
        raise WireMismatch(f"wanted {-(-count // 8)} bytes that say which of {count} tokens count, got {bits.numel()}")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=count)).nonzero().squeeze(1)


def named(states: States, terms: Terms) -> dict[str, Tensor]:
    """Return states by the names that their tensors have in a frame."""
    return {_name(terms.blocks.index(path)): one for path, one in states.items()}


def described(states: States, terms: Terms) -> tuple[BlockState, ...]:
    """Return what rows of states are, in the order of the terms."""
    return tuple(
        BlockState.model_validate(
            {"block": path, "width": states[path].shape[1], "dtype": str(states[path].dtype).removeprefix("torch.")}
        )
        for path in terms.blocks
        if path in states
    )


def bytes_per_row(wanted: Sequence[BlockState]) -> int:
    """Return the bytes of one row of each of these states."""
    return sum(one.width * _dtype(one).itemsize for one in wanted)


def shapes_of(wanted: Sequence[BlockState], terms: Terms, rows: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and type of each tensor of states in a frame, of so many rows."""
    return {_name(terms.blocks.index(one.block)): ((rows, one.width), _dtype(one)) for one in wanted}


def read(
    tensors: Mapping[str, Tensor], wanted: Sequence[BlockState], terms: Terms, rows: int, device: torch.device
) -> States | None:
    """Return the states in a frame, by the path of their block; None where a tensor is missing, or another one."""
    found = dict[str, Tensor]()
    for one in wanted:
        tensor = tensors.get(_name(terms.blocks.index(one.block)))
        if tensor is None or tuple(tensor.shape) != (rows, one.width) or tensor.dtype is not _dtype(one):
            return None
        found[one.block] = tensor.to(device)
    return found


def _name(number: int) -> str:
    return f"state.{number}"


def _dtype(one: BlockState) -> torch.dtype:
    found = getattr(torch, one.dtype)
    assert isinstance(found, torch.dtype)
    return found


@dataclass(slots=True)
class SentStates(TeacherStates):
    """The states in the newest answer of a teacher elsewhere."""

    held: dict[str, Tensor] = field(default_factory=dict)

    def hold(self, states: States) -> None:
        """Hold the states of an answer, until they are taken or the next one comes."""
        self.held = dict(states)

    def taken(self, batch: Mapping[str, Tensor], valid: Tensor) -> Mapping[str, Tensor]:
        found, self.held = self.held, {}
        assert all(len(one) == len(valid) for one in found.values()), "the answer is of this batch"
        return found
