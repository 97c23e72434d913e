"""A trained model as lm-eval-harness sees one (extra `lm-eval`): log-likelihoods of continuations, and generated text.

Tokens are those of the files from which transformers loads the tokenizer, beginning-of-text token included where these
ask for one; an empty context is that token, else the separator. So the figures are those of lm-eval's own `hf` model on
the exported folder, for any module that returns logits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoTokenizer

from gossamer.job.found_model import FoundModel
from gossamer.model.forward_adapter import caller_of
from gossamer.model.generate import TokenChoice, continued
from gossamer.model.side_effects import gradless
from gossamer.model.token_logits import logits_of, token_logits
from gossamer.spec.errors import bad_input

_BATCH_TOKENS = 2048  # so many are computed together: logits over 50,000 tokens take 0.4 GB
_NEW_TOKENS = 256  # of a task that does not say how many; the harness's default

Scored = tuple[Any, list[int], list[int]]  # key of the request, tokens of the context, tokens of the continuation


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A `FoundModel` for `lm_eval.simple_evaluate`. `sees`: tokens that the model sees at once."""

    def __init__(self, found: FoundModel, sees: int) -> None:
        super().__init__()
        self.module, self.max_length = found.module.eval(), sees
        self._caller = caller_of(self.module)
        self._logits = token_logits(self.module)
        first = next(self.module.parameters(), None)
        self._device = first.device if first is not None else torch.device("cpu")
        with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
            found.tokenizer.save(Path(folder))
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._separator = found.tokenizer.separator

    @property
    def eot_token_id(self) -> int:
        return self._separator

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self._separator if begin is None else int(begin)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text; with the tokenizer's own special tokens unless told otherwise."""
        told = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and string.startswith(str(self.tokenizer.decode(self.prefix_token_id))):
            told = {"add_special_tokens": False}
        return [int(one) for one in self.tokenizer.encode(string, **told)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, every token once, in windows of what the model sees."""
        scored, of = list[Scored](), list[int]()
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                before, after = make_disjoint_window(window)
                scored.append((None, list(before), list(after)))
                of.append(number)
        found = [0.0] * len(requests)
        for number, (value, _) in zip(of, self._loglikelihood_tokens(scored), strict=True):
            found[number] += value
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **_: Any) -> list[tuple[float, bool]]:
        """Return for each request the log-probability of its continuation, and whether that is the greedy one."""
        longest = max((len(after) for _, _, after in requests), default=0)
        if longest > self.max_length:
            raise bad_input(
                wanted=f"answers of at most {self.max_length} tokens, as many as the model sees",
                got=f"one of {longest}",
                do="raise --sequence, or leave the task out",
                key="--tasks",
            )
        sequences = [(before + after)[-(self.max_length + 1) :] for _, before, after in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for rows in _batches(sequences):
            width = len(sequences[rows[0]]) - 1
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            for place, row in enumerate(rows):
                given = sequences[row][:-1]
                ids[place, : len(given)] = torch.tensor(given)  # the padding on the right changes nothing before it
            logits = self._logits_after(ids)
            for place, row in enumerate(rows):
                count, end = len(requests[row][2]), len(sequences[row]) - 1
                if not count:
                    continue  # nothing is certain
                chances = logits[place, end - count : end].float().log_softmax(-1).cpu()
                after = torch.tensor(sequences[row][-count:])
                value = float(chances.gather(-1, after[:, None]).sum())
                found[row] = (value, bool((chances.argmax(-1) == after).all()))
        return found

    def _logits_after(self, ids: torch.Tensor) -> torch.Tensor:
        batch = {"input_ids": ids.to(self._device)}
        return gradless(lambda: logits_of(self._caller(self.module, batch)))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to the first of the texts that end it."""
        return [self._generated(*request.args) for request in requests]

    def _generated(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        ends = [until] if isinstance(until, str) else list(until)
        tokens = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or _NEW_TOKENS)
        temperature = float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0
        choice, draws = TokenChoice(temperature=temperature), torch.Generator().manual_seed(0)
        seen = max(1, self.max_length - tokens)
        given = (self.tok_encode(context) or [self.prefix_token_id])[-seen:]
        added, text = list[int](), ""
        for token in continued(
            given,
            lambda ids: choice.draw(self._logits.after(ids), draws),
            tokens=tokens,
            window=self.max_length,
            stops=(self.eot_token_id,),
        ):
            added.append(token)
            text = str(self.tokenizer.decode(added, skip_special_tokens=True))
            if any(end in text for end in ends if end):
                break
        for end in filter(None, ends):
            text = text.split(end)[0]
        return text


def _batches(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield the numbers of the sequences, the longest first, as many at a time as `_BATCH_TOKENS` allows."""
    order = sorted(range(len(sequences)), key=lambda row: -len(sequences[row]))
    while order:
        count = max(1, _BATCH_TOKENS // max(1, len(sequences[order[0]])))
        yield order[:count]
        order = order[count:]
