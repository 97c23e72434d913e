"""`gossamer eval --tasks`: on tasks of lm-eval-harness in local files, beside its own model of the exported run."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import gossamer
from gossamer.spec.errors import BadInput
from system.command import SIZES, WORDS, InThisProcess, Place

pytest.importorskip("lm_eval")

pytestmark = pytest.mark.nightly  # a run, and minutes of imports
LLAMA = {"hf": "llama", "config": {**SIZES, "max_position_embeddings": 64}}
TASKS = {
    "choice": """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
task: local_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "generated": """
task: local_generated
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: " stone"
generation_kwargs: {until: ["\\n", "lamp"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
CONTEXTS = [
    "",
    "stone",
    "river lamp ",
    "under walks slowly because the light of the house is on paper in winter, and bread",
]


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")  # the harness sets it
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place.folder / "cache"))
    questions = [
        {"question": f"{one} {other}", "choices": [WORDS[n], other, "xyz"], "answer": n % 3}
        for n, (one, other) in enumerate(pairwise(WORDS))
    ]
    texts = [{"text": " ".join(WORDS[n:] + WORDS[:n])} for n in range(4)]
    for name, rows in (("questions", questions), ("texts", texts)):
        (place.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        (place.folder / f"{name}.yaml").write_text(task.replace("FOLDER", str(place.folder)))
    return place


def asked(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=0) for one in arguments]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_every_figure_is_that_of_the_harness_on_the_exported_weights(here: Place, tokenizer: str) -> None:
    from lm_eval.models.huggingface import HFLM

    from gossamer.job.found_model import find_model
    from gossamer.job.harness_model import HarnessModel

    size = 300 if tokenizer == "bpe:300" else 257
    config = here.config(
        model={"hf": "llama", "config": {**LLAMA["config"], "vocab_size": size}},  # type: ignore[dict-item]
        data={"tokenizer": tokenizer},
        train={"steps": 30, "optimizer": {"adamw": {"lr": 3e-3}}},
    )
    here.good("train", config)
    (run,) = here.runs()
    gossamer.export(run, "hf")
    theirs = HFLM(pretrained="hf", batch_size=1, device="cpu")
    ours = HarnessModel(find_model(run), 64)
    assert theirs.max_length == find_model(run).positions == 64
    pairs = [(context, word) for context in CONTEXTS for word in (" lamp", "stone", " river light " * 4)]
    with pytest.raises(BadInput, match="answers of at most 64 tokens"):
        ours.loglikelihood(asked("loglikelihood", [("stone", " river" * 99)]))
    for mine, other in zip(
        ours.loglikelihood(asked("loglikelihood", pairs)),
        theirs.loglikelihood(asked("loglikelihood", pairs)),
        strict=True,
    ):
        assert mine[0] == pytest.approx(other[0], rel=1e-5) and mine[1] == other[1]
    texts = [(" ".join(WORDS[:n]),) for n in (1, 3, 14)]  # the last is longer than the model sees
    whole = ours.loglikelihood_rolling(asked("loglikelihood_rolling", texts))
    assert whole == pytest.approx(theirs.loglikelihood_rolling(asked("loglikelihood_rolling", texts)), rel=1e-5)
    for settings in ({"until": ["lamp", "\n"], "max_gen_toks": 20}, {"until": [" "], "max_gen_toks": 8}):
        asks = [(context, settings) for context in CONTEXTS[1:]]
        mine = ours.generate_until(asked("generate_until", asks))
        assert mine == theirs.generate_until(asked("generate_until", asks))


def test_the_command_shows_what_the_harness_finds(here: Place, inside: InThisProcess) -> None:
    import lm_eval

    here.good("train", here.config(model=LLAMA))
    (run,) = here.runs()
    gossamer.export(run, "hf")
    names = ["choice.yaml", "rolling.yaml", "generated.yaml"]
    told = inside.good(here, "eval", run, "--tasks", ",".join(names), "--json").last()
    theirs = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": "hf"}, tasks=names, device="cpu", log_samples=False
    )["results"]
    assert {one["task"] for one in told["tasks"]} == {"local_choice", "local_rolling", "local_generated"}
    assert len(told["tasks"]) == 6 and (told["step"], told["sequence"]) == (4, 64)
    for one in told["tasks"]:
        assert one["value"] == pytest.approx(theirs[one["task"]][f"{one['metric']},{one['filter']}"], rel=1e-5), one
    folder = inside.good(here, "eval", "hf", "--tasks", "choice.yaml", "--sequences", "5", "--shots", "1")
    lines = folder.out.splitlines()
    assert lines[1].split() == ["task", "metric", "value", "+-", "examples", "shots"]
    assert lines[2].split()[0] == "local_choice" and lines[2].split()[-2:] == ["5", "1"]


def test_what_is_no_task_is_refused(here: Place, monkeypatch: pytest.MonkeyPatch, inside: InThisProcess) -> None:
    with pytest.raises(BadInput, match="did you mean 'arc_easy'"):
        gossamer.evaluate_on_tasks("runs/none", ["arc_eazy"])
    done = inside.run(here, "eval", "runs/none", "text.txt", "--tasks", "arc_easy")
    assert done.code == 2 and "wanted tasks alone" in done.err
    done = inside.run(here, "eval", "runs/none", "--shots", "2")
    assert done.code == 2 and "--shots with --tasks" in done.err
    (here.folder / "away.yaml").write_text(TASKS["choice"].replace("FOLDER/questions", "nowhere/questions"))
    here.good("train", here.config(model=LLAMA))
    done = inside.run(here, "eval", here.runs()[0], "--tasks", "away.yaml")
    assert done.code == 2 and "the data of the tasks cannot be read" in done.err, done.err


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(BadInput, match="--tasks needs the package lm-eval"):
        gossamer.evaluate_on_tasks(Path("runs/none"), ["arc_easy"])
