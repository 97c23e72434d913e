"""`gossamer init`: what it writes is complete, valid, trains, and never replaces a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import gossamer
from gossamer.api.starters import STARTERS
from gossamer.cli import main

FIRST = 29  # schemas of Kubernetes 1.26 to 1.28 ask for onPodConditions in every rule of a podFailurePolicy
CONFIGURED = [name for name, one in STARTERS.items() if "run.yaml" in {**one.files, **(one.beside or {})}]
PROGRAMS = [name for name, one in STARTERS.items() if "train.py" in one.files]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_an_argument_it_lists_every_start_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init"]) == 0
    begins = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}  # on any screen
    assert begins >= {*STARTERS} and not list(here.iterdir())


@pytest.mark.parametrize("kind", STARTERS)
def test_it_writes_the_files_that_it_names(kind: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", kind, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(told["written"]) == sorted(path.name for path in here.iterdir())
    assert set(STARTERS[kind].files) <= set(told["written"])


@pytest.mark.parametrize("kind", CONFIGURED)
def test_its_configuration_is_valid(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["init", kind])
    assert main(["config", "check", "run.yaml"]) == 0, capsys.readouterr().err


def test_an_existing_file_is_named_and_nothing_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "model.py").write_text("mine")
    assert main(["init", "pretrain"]) == 2
    assert "model.py exists already" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["model.py"] and (here / "model.py").read_text() == "mine"


def test_a_link_that_leads_nowhere_is_a_file_that_exists(here: Path) -> None:
    (here / "run.yaml").symlink_to("nowhere")
    assert main(["init", "finetune"]) == 2
    assert not (here / "nowhere").exists()


def test_a_start_around_run_yaml_leaves_the_one_that_is_there(here: Path) -> None:
    (here / "run.yaml").write_text("train: {steps: 3}\n")
    assert main(["init", "kubernetes"]) == 0
    assert (here / "run.yaml").read_text() == "train: {steps: 3}\n"
    assert sorted(path.name for path in here.iterdir()) == ["Dockerfile", "job.yaml", "run.yaml"]


def test_an_unknown_start_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "pretrian"]) == 2
    assert "did you mean 'pretrain'?" in capsys.readouterr().err


def started(*words: str, here: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python command in the folder, on this source tree, without the network."""
    source = str(Path(gossamer.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=here, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("pretrain", marks=pytest.mark.nightly),
        pytest.param("two_sites", marks=pytest.mark.nightly),
        "finetune",
    ],
)
def test_its_configuration_trains_as_it_is(kind: str, here: Path) -> None:
    main(["init", kind])
    shorter = ["train.steps=2", "train.evaluate_sequences=4", 'train.sample_prompt=""']
    done = started("-m", "gossamer", "train", "run.yaml", *shorter, "--json", here=here)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["outcome"], told["steps"]) == ("done", 2)
    assert told["ranks"] == (2 if kind == "two_sites" else 1)


@pytest.mark.nightly
def test_pretraining_imports_no_extra(here: Path) -> None:
    main(["init", "pretrain"])
    (here / "sitecustomize.py").write_text(
        "import sys\nfor name in ('transformers', 'tokenizers', 'gguf', 'peft'):\n    sys.modules[name] = None\n"
    )
    source = str(Path(gossamer.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), source]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gossamer", "train", "run.yaml", "train.steps=1", "train.evaluate_sequences=2"]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", PROGRAMS)
def test_its_program_trains_as_it_is(kind: str, here: Path) -> None:
    main(["init", kind])
    done = started("train.py", "--steps", "2", here=here)
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout or "right on" in done.stdout


def test_the_manifest_is_an_indexed_job_whose_pods_meet_at_the_first(here: Path) -> None:
    main(["init", "kubernetes"])
    service, job = yaml.safe_load_all((here / "job.yaml").read_text())
    spec, (container,) = job["spec"], job["spec"]["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed" and spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert spec["completions"] == spec["parallelism"] == int(container["env"][0]["value"])
    assert f"{job['metadata']['name']}-0.{service['metadata']['name']}:29400" in container["args"][0]
    assert {
        rule["onExitCodes"]["containerName"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    } == {container["name"]}


@pytest.mark.parametrize(("kind", "file"), [("kubernetes", "job.yaml"), ("skypilot", "task.yaml")])
def test_the_command_in_a_manifest_is_one(kind: str, file: str, here: Path) -> None:
    from gossamer.cli import make_app

    main(["init", kind])
    text = (here / file).read_text().replace("\\\n", " ")
    (line,) = [one for one in text.splitlines() if "gossamer train " in one and not one.startswith("#")]
    words = line.partition("gossamer train")[2].replace('"', "").split()
    words = [
        {"$NODES": "2", "$SKYPILOT_NUM_NODES": "2"}.get(word, "0" if word.startswith("$") and "RANK" in word else word)
        for word in words
    ]
    words = ["0" if word == "$JOB_COMPLETION_INDEX" else word for word in words]
    make_app().parse_args(["train", *words], exit_on_error=False, print_error=False)


def test_the_manifest_has_the_schema_of_kubernetes(here: Path) -> None:
    checker = pytest.importorskip("kubernetes_validate")
    main(["init", "kubernetes"])
    service, job = yaml.safe_load_all((here / "job.yaml").read_text())
    newest = checker.latest_version()
    versions = [f"1.{minor}" for minor in range(FIRST, int(newest.split(".")[1]) + 1)]
    for version in versions:
        for one in (service, job):
            checker.validate(one, version, strict=True)
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(checker.ValidationError, match="completionsMode"):
        checker.validate(job, newest, strict=True)


def test_the_task_file_has_the_schema_of_skypilot(here: Path) -> None:
    sky = pytest.importorskip("sky")
    main(["init", "skypilot"])
    task = sky.Task.from_yaml(str(here / "task.yaml"))
    assert (task.num_nodes, task.name, task.workdir) == (2, "gossamer", ".")
    assert "--nnodes" in task.run and "pip install" in task.setup
    (here / "task.yaml").write_text((here / "task.yaml").read_text().replace("num_nodes:", "nodes:"))
    with pytest.raises(ValueError, match="nodes"):
        sky.Task.from_yaml(str(here / "task.yaml"))


INSTRUCTIONS = {"FROM", "RUN", "COPY", "WORKDIR"}  # those that it needs


def test_the_dockerfile_installs_the_wheel_and_takes_what_a_run_names(here: Path) -> None:
    main(["init", "kubernetes"])
    text = (here / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert {name for name, _ in steps} == INSTRUCTIONS and steps[0][0] == "FROM"
    said = [f"{name} {rest}" for name, rest in steps]
    torch, wheel = (next(n for n, one in enumerate(said) if part in one) for part in ("torch>=", "COPY gossamer-"))
    install = next(n for n, one in enumerate(said) if "pip install" in one and "gossamer-*.whl" in one)
    place = said.index("WORKDIR /work")
    assert torch < install and wheel < install and place < next(n for n, one in enumerate(said) if "run.yaml" in one)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (wanted,) = re.findall(r'"torch>=[^"]+"', project)
    assert wanted in said[torch], "the torch that the package wants"
