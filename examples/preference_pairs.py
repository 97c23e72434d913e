"""Teach a model which of two answers is preferred (DPO): python preference_pairs.py

A tiny Llama (extra `hf`) first learns to be rude: one answer in five of its training is polite. Then direct preference
optimization raises the polite ones. The script counts in how many new pairs the polite answer is the more probable one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import gossamer

LLAMA = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": True}
TEMPLATE = (  # what the model reads; a chat model brings its own
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CITIES = ["Rome", "Paris", "Bern", "Oslo", "Cairo", "Lima", "Quito", "Delhi"]
CITIES += ["Seoul", "Accra", "Hanoi", "Minsk", "Riga", "Sofia", "Tunis", "Dakar"]


def pairs() -> list[dict[str, str]]:
    """Return pairs of answers: the polite one is preferred."""
    asked = [(f"{verb} {city}?", city) for city in CITIES for verb in ("Where is", "Do you know", "How far is")]
    return [{"prompt": q, "chosen": f"Gladly: {city}.", "rejected": f"No, not {city}."} for q, city in asked]


def trained(model: dict[str, object], source: dict[str, object], name: str, **train: object) -> str:
    """Train on text that `chat.jinja` makes, and return the run directory."""
    config = {
        "data": {"sequence": 96, "validation": 0, "pack": False},
        "train": {"batch": 16, "evaluate_every": 0, "checkpoint_every": 0, **train},
        "run": {"display": "quiet", "name": name},
    }
    return str(gossamer.train(model, source, config)["directory"])


def preferred(run: str, told: list[dict[str, str]]) -> float:
    """Return the fraction of pairs of which the model finds the chosen answer more probable than the rejected one."""
    found = gossamer.load(run)
    words = found.words()

    def score(prompt: str, answer: str) -> float:
        head = [*words.encode(f"user: {prompt}"), words.separator, *words.encode("assistant: ")]
        ids = torch.tensor([*head, *words.encode(answer)])
        with torch.no_grad():
            logits = found.module(input_ids=ids[None]).logits[0]
        return -float(cross_entropy(logits[len(head) - 1 : -1], ids[len(head) :], reduction="mean"))

    wins = [score(one["prompt"], one["chosen"]) > score(one["prompt"], one["rejected"]) for one in told]
    return sum(wins) / len(wins)


def main() -> None:
    random.seed(0)
    told = pairs()
    random.shuffle(told)
    Path("chat.jinja").write_text(TEMPLATE)
    Path("pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told[:40]))  # 8 are held out
    both = [{"messages": [user(one), says(one["rejected"])]} for one in told]
    both += [{"messages": [user(one), says(one["chosen"])]} for one in told[::4]]
    Path("both.jsonl").write_text("".join(json.dumps(one) + "\n" for one in both))

    chats = {"chat": {"files": "both.jsonl", "template": "chat.jinja"}}
    first = trained({"hf": "llama", "config": LLAMA}, chats, "both", steps=120, optimizer={"adamw": {"lr": 3e-3}})
    gossamer.export(first, "base")

    source = {"pairs": {"files": "pairs.jsonl", "template": "chat.jinja"}}
    dpo = {"loss": {"dpo": {"beta": 0.1}}, "optimizer": {"adamw": {"lr": 3e-4}}, "steps": 40}
    second = trained({"hf": "base"}, source, "preferred", **dpo)
    for name, run in (("before", first), ("after", second)):
        print(f"{name}: the preferred answer is the more probable one in {preferred(run, told[40:]):.0%} of new pairs")


def user(pair: dict[str, str]) -> dict[str, str]:
    return {"role": "user", "content": pair["prompt"]}


def says(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": answer}


if __name__ == "__main__":
    main()
