"""The command line as its users meet it: answers, errors, exit codes, --json, and nothing imported for help."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gossamer
from gossamer.api import verbs
from gossamer.cli import COMMANDS, main
from gossamer.launch.rendezvous_config import Node
from gossamer.spec.errors import BadInput, Interrupted, PeerLost, RunFailed
from gossamer.spec.extras import install

DONE = {"directory": "runs/a", "outcome": "done", "steps": 5, "seconds": 2.0, "validation_bits_per_byte": 2.5}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text("train: {batch: 16}\n")
    return tmp_path / "run.yaml"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `gossamer train` would have been called with; nothing is trained."""
    calls: list[dict[str, Any]] = []

    def train_command(resolved: Any, **rest: Any) -> dict[str, Any]:
        calls.append({"config": resolved.config, "origin": resolved.origin, **rest})
        return DONE

    monkeypatch.setattr(verbs, "train_command", train_command)
    return calls


def raising(error: BaseException) -> Callable[..., Any]:
    def command(*args: Any, **rest: Any) -> Any:
        raise error

    return command


def test_help_and_the_library_itself_import_no_torch() -> None:
    program = (
        "import sys, io, contextlib, gossamer\n"
        "from gossamer.cli import COMMANDS, main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    codes = [main(['--help']), *(main([name, '--help']) for name in COMMANDS if name != 'lab')]\n"
        "    codes += [main(['methods', 'optimizer']), main(['config', 'show', '--json']), main(['--version'])]\n"
        "assert not any(codes), codes\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_names_every_command_and_loads_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in COMMANDS)
    assert "Exit codes: 0" in out
    program = (
        "import sys; from gossamer.cli import main; main(['--help']); assert 'gossamer.api.verbs' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_python_m_gossamer_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "gossamer", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, gossamer.__version__)
    done = subprocess.run([sys.executable, "-m", "gossamer", "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "did you mean 'train'?" in done.stderr and not done.stdout


def test_the_public_names_are_there() -> None:
    import gossamer.plan

    assert callable(gossamer.train) and callable(gossamer.wrap) and callable(gossamer.plan)
    assert gossamer.plan.names is sys.modules["gossamer.plan"].names
    assert gossamer.RunConfig().train.batch == 64 and gossamer.Plan.__name__ == "Plan"
    assert dir(gossamer) == sorted(gossamer.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        gossamer.trian  # noqa: B018


USAGE = {
    ("trian",): "there is no command 'trian': did you mean 'train'?",
    ("config", "shw"): "there is no command 'shw': did you mean 'show'?",
    ("train",): "RUN",
    ("train", "run.yaml", "--hots", "a"): "--hots. Did you mean --hosts?",
    ("train", "run.yaml", "--steps", "3"): "there is no option --steps: write train.steps=3",
    ("train", "run.yaml", "--train.steps=3"): "write train.steps=3",
    ("train", "run.yaml", "--train.optimizer.sgd.lr", "0.1"): "write train.optimizer.sgd.lr=0.1",
    ("train", "run.yaml", "--batch-size", "8"): "write train.batch=8",
    ("train", "run.yaml", "--lr=1e-3"): "write train.optimizer.adamw.lr=1e-3",
    ("train", "run.yaml", "--seed"): "write train.seed=VALUE",
    (
        "train",
        "run.yaml",
        "--schedule",
        "constant",
    ): "write train.lr_schedule=constant or plan.pipeline_schedule=constant",
    ("train", "run.yaml", "--nothing-alike", "8"): "--nothing-alike",
    ("resume", "runs/none", "--steps", "3"): "write train.steps=3",
    ("config", "check", "run.yaml", "--steps", "3"): "write train.steps=3",
    ("sample", "runs/none", "a", "--steps", "3"): "Unknown option: --steps",
    ("train", "run.yaml", "--resume", "now"): "auto",
    ("train", "nowhere.yaml"): "there is no file nowhere.yaml",
    ("sample", "runs/none"): "PROMPT",
    ("sample", "runs/none", "a", "--max-new-tokens", "many"): "many",
    ("sample", "runs/none", "a", "--max-new-tokens", "0"): "--max-new-tokens: wanted a number >= 1, got 0",
    ("sample", "runs/none", "a", "--temperature", "-1"): "--temperature",
    ("sample", "runs/none", "a"): "runs/none",
    ("resume", "runs/none"): "runs/none",
    ("resume", "run.yaml"): "wanted a run directory at run.yaml, got a file",
    ("export", "runs/none", "out", "--to", "onnx"): "gguf",
    ("export", "runs/none", "out", "--to", "gguf", "--type", "q2"): "q8_0",
    ("export", "runs/none", "out", "--to", "hf", "--type", "f16"): "--type: wanted a type with --to gguf alone",
    ("export", "runs/none", "out"): "--to",
    ("demo", "--seconds", "-1"): "wanted seconds > 0, got -1",
    ("methods", "optimzer"): "there is no category 'optimzer': did you mean 'optimizer'",
    ("methods", "optimizer", "adamv"): "did you mean 'adamw' or 'adamw_8bit'?",
    ("config", "check", "nowhere.yaml"): "nowhere.yaml",
}


@pytest.mark.parametrize("argv", USAGE, ids=" ".join)
def test_what_the_user_gave_wrong_is_exit_2_and_one_block(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").touch()
    assert main([*argv, "--json"]) == 2
    out, err = capsys.readouterr()
    assert USAGE[argv] in err and "Traceback" not in err
    last = json.loads(out.splitlines()[-1])
    assert last["exit"] == 2 and USAGE[argv] in last["error"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.yaml"]


MEETING = {
    ("--node-rank", "0", "--nnodes", "2"): "--nnodes and --rdzv-endpoint go together",
    ("--rdzv-endpoint", "a:1"): "--nnodes and --rdzv-endpoint go together",
    (
        "--node-rank",
        "2",
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        "a:1",
    ): "--node-rank: wanted 0 to 1, as --nnodes is 2, got 2",
    ("--node-rank", "one", "--nnodes", "2", "--rdzv-endpoint", "a:1"): "node-rank",
    ("--node-rank", "0", "--nnodes", "2", "--rdzv-endpoint", "a"): "wanted HOST:PORT",
    ("--node-rank", "0", "--nnodes", "2", "--rdzv-endpoint", "a:99999"): "wanted HOST:PORT",
    ("--node-rank", "0", "--nnodes", "2", "--rdzv-endpoint", "a:1", "--hosts", "a,b"): "give one of them",
    ("--host", "0/2"): "write --node-rank I --nnodes N",
    ("--meet", "a:1"): "write --rdzv-endpoint HOST:PORT",
    ("--hosts", "a,,b"): "wanted names of different hosts",
    ("--hosts", "a,a"): "wanted names of different hosts",
    ("--plan", "none.yaml"): "none.yaml, which is no file",
    ("train.batch=0",): "train.batch: wanted a whole number >= 1",
    ("train.optimizer=adamv",): "did you mean 'adamw' or 'adamw_8bit'?",
}


@pytest.mark.parametrize("rest", MEETING, ids=" ".join)
def test_train_refuses_before_anything_is_started(
    rest: tuple[str, ...], file: Path, trained: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file), *rest]) == 2
    assert MEETING[rest] in capsys.readouterr().err
    assert not trained


def test_train_hands_everything_over(file: Path, trained: list[dict[str, Any]], tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.touch()
    argv = ["train", str(file), "train.steps=5", "--plan", str(plan), "--hosts", "a, b", "--resume", "auto"]
    assert main([*argv, "data.source=text:*.txt", "--dry-run"]) == 0
    (call,) = trained
    config = call["config"]
    assert (config.train.batch, config.train.steps, config.data.source) == (16, 5, "text:*.txt")
    assert call["origin"]["train.batch"] == f"{file}:1" and call["origin"]["train.steps"] == "command line"
    assert (call["plan"], call["hosts"], call["resume"], call["dry_run"]) == (plan, ["a", "b"], "auto", True)
    assert main(["train", str(file), "--node-rank", "1", "--nnodes", "2", "--rdzv-endpoint", "host0:29500"]) == 0
    assert (trained[1]["node"], trained[1]["hosts"]) == (Node(1, 2, "host0", 29500), [])


def test_a_run_that_is_done_says_what_it_came_to(
    file: Path, trained: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file)]) == 0
    out = capsys.readouterr().out
    assert "runs/a: done at step 5, in 2 s, validation 2.500 bits/byte" in out and "gossamer sample runs/a" in out
    assert main(["train", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == DONE


ENDINGS = [
    (BadInput("too many ranks", key="machines.processes"), 2, "machines.processes: too many ranks"),
    (RunFailed("rank 1 ran out of memory"), 3, "The run failed:\n  rank 1 ran out of memory"),
    (PeerLost("rank 1 is gone"), 3, "The run failed (peer lost):"),
    (Interrupted("saved at step 7"), 4, "Interrupted, with a checkpoint saved:\n  saved at step 7"),
    (KeyboardInterrupt(), 3, "Stopped at once:"),
    (SystemExit(0), 3, "ended the process (SystemExit: 0)"),
    (ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow"), 2, install("parquet")),
    (ModuleNotFoundError("No module named 'mlflow.x'", name="mlflow.x"), 2, install("mlflow")),
]


@pytest.mark.parametrize(("error", "code", "said"), ENDINGS, ids=lambda x: type(x).__name__)
def test_each_ending_has_its_exit_code_and_its_block(
    error: BaseException,
    code: int,
    said: str,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verbs, "train_command", raising(error))
    assert main(["train", str(file), "--json"]) == code
    out, err = capsys.readouterr()
    assert said in err and "Traceback" not in err
    assert json.loads(out.splitlines()[-1])["exit"] == code


def test_a_complaint_of_the_run_about_a_key_is_told_with_its_place(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (BadInput("more ranks than rows", key="train.batch"), BadInput("train.batch: more ranks than rows")):
        monkeypatch.setattr(verbs, "train_command", raising(error))
        assert main(["train", str(file)]) == 2
        assert f"{file}:1: train.batch: more ranks than rows" in capsys.readouterr().err
    monkeypatch.setattr(verbs, "train_command", raising(BadInput("data.source: nothing there")))
    assert main(["train", str(file), "data.source=text:x", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "command line: data.source: nothing there"
    assert main(["train", str(file), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "data.source: nothing there"


def test_what_nobody_expected_keeps_its_traceback_in_a_file(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(verbs, "train_command", raising(ZeroDivisionError("by nought")))
    assert main(["train", str(file), "--json"]) == 3
    out, err = capsys.readouterr()
    assert "ZeroDivisionError: by nought" in err and "Traceback (most" not in err
    kept = Path(json.loads(out)["traceback"])
    assert kept.parent == tmp_path and "Traceback (most recent call last)" in kept.read_text()


def test_an_exit_of_a_worker_is_passed_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "train_command", raising(SystemExit(4)))
    assert main(["train", str(file)]) == 4


def test_sample_writes_what_the_model_says_whatever_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def sample(run_dir: Path, prompt: str, **rest: Any) -> str:
        asked.update(rest, run_dir=run_dir)
        return "\ufffd\x1b nan"

    monkeypatch.setattr(verbs, "sample", sample)
    assert main(["sample", "runs/a", "def ", "--max-new-tokens", "3", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prompt": "def ", "text": "\ufffd\x1b nan"}
    assert main(["sample", "runs/a", "def ", "--max-new-tokens", "3", "--seed", "1"]) == 0
    assert capsys.readouterr().out == "def \ufffd\\x1b nan\n"
    given = {"tokens": 3, "temperature": 0.8, "top_k": 50, "seed": 1, "checkpoint": "latest"}
    assert asked == {"run_dir": Path("runs/a"), **given}


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("", BadInput("wanted a model", key="model"), "run.yaml (it sets nothing): model: wanted a model"),
        ("", BadInput("model: wanted a model"), "run.yaml (it sets nothing): model: wanted a model"),
        ("train: {batch: 8}", BadInput("none", key="data.source"), "  data.source: none"),
        ("train: {batch: 8}", BadInput("none", key="model"), "  run.yaml: model: none"),
        ("train: {batch: 8}", BadInput("few", key="train.batch"), "  run.yaml:1: train.batch: few"),
        ("train: {batch: 8}", BadInput("a port is in use"), "  a port is in use"),
    ],
)
def test_what_no_line_says_is_told_with_its_file(
    text: str,
    error: BadInput,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verbs, "train_command", raising(error))
    (tmp_path / "run.yaml").write_text(text)
    assert main(["train", "run.yaml"]) == 2
    assert f"{said}\n" in capsys.readouterr().err


def test_no_command_is_the_help_and_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_letters_of_the_command_line_are_utf_8_under_any_locale(encoding: str, tmp_path: Path) -> None:
    """What `LC_ALL=C` makes of them depends on the Python; one that cannot read them hands over half letters."""
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": str(int(encoding == "utf-8")), "PYTHONCOERCECLOCALE": "0"}
    command = [os.fsencode(sys.executable), b"-m", b"gossamer", b"config", b"show", b"--json"]

    def shown(*more: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*command, *more], capture_output=True, env=environ, cwd=tmp_path, check=False)

    done = shown("train.sample_prompt=für 猫".encode())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["config"]["train"]["sample_prompt"] == "für 猫"
    done = shown(b"train.sample_prompt=f\xfcr")
    assert done.returncode == 2 and b"train.sample_prompt: wanted text, got" in done.stderr, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_answer_that_nobody_can_read_undoes_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from gossamer.api import verbs as api; from gossamer.cli import main\n"
        f"api.train_command = lambda *args, **rest: {DONE!r}\n"
        "sys.exit(main())"
    )
    (tmp_path / "run.yaml").touch()

    def told(*argv: str, out: str = "/dev/full") -> tuple[int, str]:
        with open(out, "w") as full:
            command = [sys.executable, "-c", program, *argv]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
        return done.returncode, done.stderr

    code, said = told("train", "run.yaml")
    assert code == 0 and said == (
        "The command is done, but its result is not printed: cannot write to standard output: No space left on device\n"
    )
    code, said = told("methods")
    assert code == 3 and "The answer could not be written:" in said and "Traceback" not in said
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "gossamer", "methods"], check=False
    )
    assert closed.returncode == 0


def test_resume_and_export_hand_over(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def resumed(run_dir: Path, overrides: list[str], *, checkpoint: str) -> dict[str, Any]:
        return {**DONE, "got": [run_dir, overrides, checkpoint]}

    monkeypatch.setattr(verbs, "resume_command", resumed)
    assert main(["resume", "runs/a", "train.steps=9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["got"] == ["runs/a", ["train.steps=9"], "latest"]
    assert main(["resume", "runs/a", "--checkpoint", "best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["got"] == ["runs/a", [], "best"]
    monkeypatch.setattr(verbs, "export", lambda run_dir, target, **rest: {"exported": str(target), "load": "so"})
    assert main(["export", "runs/a", "out", "--to", "hf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"exported": "out", "load": "so"}
    assert main(["export", "runs/a", "out", "--to", "hf"]) == 0
    assert capsys.readouterr().out == "out is written: so\n"


def test_json_has_no_nan(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"loss": float("nan"), "rates": [1.0, float("inf")], "path": Path("a")}
    monkeypatch.setattr(verbs, "train_command", lambda *args, **rest: figures)
    assert main(["train", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"loss": None, "rates": [1.0, None], "path": "a"}


def test_a_reader_that_leaves_early_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m gossamer config schema | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "{" and not done.stderr


def test_a_broken_pipe_of_the_work_itself_is_no_reader_that_left(tmp_path: Path) -> None:
    program = (
        "import sys; from gossamer.api import verbs as api; from gossamer.cli import main\n"
        "from gossamer.spec.errors import Interrupted\n"
        "def work(*args, **rest): raise Interrupted('saved') if rest['dry_run'] else BrokenPipeError('a tracker')\n"
        "api.train_command = work\n"
        "sys.stdin.read()\n"
        "sys.exit(main())"
    )
    (tmp_path / "run.yaml").touch()

    def ended(*argv: str, loses: str) -> tuple[int, str]:
        """The exit code, and what is read of the streams whose reader does not leave before the command begins."""
        command = [sys.executable, "-c", program, "train", "run.yaml", *argv]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path)
        assert process.stdin and process.stdout and process.stderr
        streams = {"stdout": process.stdout, "stderr": process.stderr}
        for name in loses.split():
            streams.pop(name).close()
        process.stdin.close()
        said = "".join(stream.read() for stream in streams.values())
        for stream in streams.values():
            stream.close()
        return process.wait(timeout=120), said

    code, said = ended(loses="stdout")
    assert code == 3 and "a tracker" in said
    assert ended("--dry-run", loses="stdout stderr") == (4, "")
    code, said = ended("--dry-run", "--json", loses="stderr")
    assert code == 4 and json.loads(said) == {"error": "saved", "exit": 4}


def test_nothing_but_the_output_module_prints() -> None:
    package = Path(gossamer.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            assert not is_print, f"{path}:{getattr(node, 'lineno', 0)} prints"


@pytest.mark.parametrize("stopped", ["cyclopts", "gossamer.cli.exit_status"])
def test_ctrl_c_while_the_program_is_loaded_is_one_line(stopped: str) -> None:
    program = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {stopped!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from gossamer.cli import main\n"
        "sys.exit(main(['methods', '--json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == "Stopped at once: nothing after the last checkpoint was saved\n"
    assert json.loads(done.stdout) == {"error": "nothing after the last checkpoint was saved", "exit": 3}
