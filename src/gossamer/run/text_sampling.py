"""Sample text from a model during training: forward passes through the stages where they are, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.comm_thread import CommThread
from gossamer.loss import Loss
from gossamer.model.generate import continue_text, sample_token
from gossamer.model.side_effects import evaluating
from gossamer.model.text_stream import TextCoder
from gossamer.model.token_logits import logits_of
from gossamer.run.batches import MicroBatch, RankBatch
from gossamer.run.forward import Pipeline, run_forward
from gossamer.run.step_runner import ModelPart, ModelRuntime

TEMPERATURE, TOP_K = 0.8, 50  # as `gossamer sample` has them
_GRAIN = 32  # sequence lengths are multiples of it: a stage traces each length once

_NONE, _FAILED = -1.0, -2.0  # in the place of a token: this rank has no logits; it could make nothing of them

GatherBytes = Callable[[tuple[float, ...]], Tensor]


class NoSample(Exception):
    """An exception on all ranks: no text can be sampled now.

    The ranks' state is as after a successful sample, and training continues.
    """


@dataclass(frozen=True, slots=True)
class _Words(TextCoder):
    """A tokenizer whose failures are `NoSample`; all ranks call it alike."""

    inner: TextCoder

    def encode(self, text: str, /) -> Any:
        with _sampling():
            return self.inner.encode(text)

    def decode(self, ids: Iterable[int], /) -> str:
        with _sampling():
            return self.inner.decode(ids)


@contextmanager
def _sampling() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a sample is only for looking at
        raise NoSample(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Logits(Loss):
    """A loss that returns logits instead: (sequence, vocabulary) of the first sequence."""

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return logits_of(output)[0]

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A sampler of text from a model in training.

    `pieces`: the stages of this rank, with `Logits` as loss; `window`: tokens that the model sees. Sequences are padded
    on the right, which changes no result of a causal model.
    """

    prompt: str
    tokens: int
    window: int
    seed: int
    words: TextCoder
    pieces: Mapping[int, ModelPart]
    pipeline: Pipeline
    pump: CommThread

    def text(self, gather: GatherBytes) -> str:
        """Return the text that continues the prompt: the same on all ranks, which must all call this method.

        `gather` collects a row from each rank. Raises NoSample on all ranks if one can draw no token, e.g. from
        non-finite logits.
        """
        generator = torch.Generator().manual_seed(self.seed)

        def choose(ids: Sequence[int]) -> int:
            logits, drawn, why = self._logits(ids), _NONE, "on another rank"
            try:
                if logits is not None:
                    drawn = float(sample_token(logits, generator, temperature=TEMPERATURE, top_k=TOP_K))
            except Exception as error:
                drawn, why = _FAILED, f"{type(error).__name__}: {error}"
            told = [token for (token,) in gather((drawn,)).tolist()]
            if _FAILED in told:
                raise NoSample(f"rank {told.index(_FAILED)} can draw no token from the model's logits: {why}")
            # Replicas on different kinds of machines may differ in the last bit: all take the first one's token.
            return int(next(token for token in told if token >= 0))

        with self.evaluating():
            return continue_text(_Words(self.words), self.prompt, choose, tokens=self.tokens, window=self.window)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set the model to evaluation mode, without gradients, inside this context."""
        with evaluating(self._engine.module), torch.no_grad():
            yield

    def rows(self, ids: Sequence[int]) -> RankBatch:
        """Return a batch of one sequence, padded on the right."""
        length = min(self.window, -(-len(ids) // _GRAIN) * _GRAIN)
        return {"input_ids": torch.tensor([[*ids, *[ids[-1]] * (length - len(ids))]], device=self._engine.device)}

    def _logits(self, ids: Sequence[int]) -> Tensor | None:
        """Return the logits, (vocabulary,), of the token after `ids`, on ranks with the last stage; None on others."""
        pipeline, rows = self.pipeline.forward_only(1), self.rows(ids)
        batches = {number: MicroBatch(0, rows) for number in pipeline.batches}
        found = run_forward(self.pump, self.pieces, pipeline, batches)
        return found[0][len(ids) - 1].float().cpu() if found else None

    @property
    def _engine(self) -> ModelRuntime:
        return next(iter(self.pieces.values())).engine
