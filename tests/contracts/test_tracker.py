"""Every tracker: tells its tool what the run says, names its extra when it is missing, and never hurts the run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gossamer.spec.errors import BadInput
from gossamer.spec.extras import install
from gossamer.spec.records import Record, Sample
from gossamer.view.tracker import REGISTRY, build, names
from gossamer.view.tracking import Trackers
from view.streams import run

CONFIG = {"train": {"steps": 200}, "model": {"hf": None}}
PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio")
TENSORBOARD = (
    "tensorboard.compat",
    "tensorboard.compat.proto",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary",
    "tensorboard.summary.writer",
    "tensorboard.summary.writer.event_file_writer",
)
ENVIRONMENT = (
    "WANDB_ERROR_REPORTING",
    "WANDB_SILENT",
    "WANDB_CONSOLE",
    "WANDB_MODE",
    "WANDB_PROJECT",
    "MLFLOW_DISABLE_TELEMETRY",
    "MLFLOW_ALLOW_FILE_STORE",
    "MLFLOW_TRACKING_URI",
    "HF_HUB_DISABLE_TELEMETRY",
    "GRADIO_ANALYTICS_ENABLED",
)


class Fake:
    """Stands for any package, class, object or function: notes every call with its arguments."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], path: str = "") -> None:
        self._calls = calls
        self._path = path

    def __getattr__(self, name: str) -> Fake:
        return Fake(self._calls, f"{self._path}.{name}")

    def __call__(self, *args: Any, **named: Any) -> Fake:
        self._calls.append((self._path, args, named))
        return Fake(self._calls, f"{self._path}()")


class FakeModule(ModuleType):
    def __init__(self, name: str, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._fake = Fake(calls, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._fake, name)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers quieten their packages through the environment: what they set ends with the test."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for name in (*PACKAGES, *TENSORBOARD):
        monkeypatch.setitem(sys.modules, name, FakeModule(name, made))
    return made


def figures(made: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> str:
    return repr([(args, named) for _, args, named in made])


def test_the_room_has_the_four() -> None:
    assert set(names()) >= set(PACKAGES)


@pytest.mark.parametrize("name", names())
def test_it_passes_the_figures_on_and_closes(name: str, calls: list[Any], tmp_path: Path) -> None:
    session = build(name).start("my-run", CONFIG, tmp_path)
    before = len(calls)
    for record in run(50, ends=False):
        session.log(record)
    said = figures(calls[before:])
    for figure in ("train/loss", "validation/loss", "validation/bits_per_byte", "speed/tokens_per_s"):
        assert figure in said
    assert "nan" not in said
    before = len(calls)
    session.log(Sample(step=1, prompt="a", text="b"))
    session.close()
    assert len(calls) == before + 1  # no place for a sample; one call that ends the run


@pytest.mark.parametrize("name", names())
def test_its_configuration_is_itself(name: str) -> None:
    assert build(name) == build(name) and issubclass(REGISTRY.type(name), REGISTRY.base)


@pytest.mark.parametrize("name", names())
def test_a_missing_package_is_bad_input_that_names_the_extra(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=rf"run\.trackers: .*{re.escape(install(name))}"):
        Trackers.start([name], run_name="r", config=CONFIG, directory=tmp_path, warn=lambda said: None)


def test_an_unknown_tracker_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"tensorbord.*tensorboard"):
        Trackers.start(["tensorbord"], run_name="r", config=CONFIG, directory=tmp_path, warn=lambda said: None)


def test_wandb_stays_here_unless_told_otherwise(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for environ, given, mode in (
        ("", {}, "offline"),
        ("online", {}, "online"),
        ("online", {"mode": "disabled"}, "disabled"),
    ):
        monkeypatch.setenv("WANDB_MODE", environ)
        build({"wandb": given}).start("r", CONFIG, tmp_path)
        assert calls[-1][0] == "wandb.init" and calls[-1][2]["mode"] == mode


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit])
@pytest.mark.parametrize("where", ["start", "log", "close"])
@pytest.mark.parametrize("name", names())
def test_one_that_fails_is_reported_once_and_dropped(
    name: str, where: str, kind: type[BaseException], calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any) -> None:
        raise kind("server\nis gone")

    if where == "start":
        monkeypatch.setattr(REGISTRY.type(name), "start", fails)
    else:
        session = type(build(name).start("r", CONFIG, tmp_path))
        monkeypatch.setattr(session, where, fails)
    said: list[str] = []
    trackers = Trackers.start([name], run_name="r", config=CONFIG, directory=tmp_path, warn=said.append)
    records: list[Record] = list(run(20))
    for record in records:
        trackers.log(record)
    trackers.close()
    trackers.close()
    assert len(said) == 1
    assert name in said[0] and "server" in said[0] and "gone" not in said[0]


class Loud(Fake):
    """A package that prints at every call."""

    def __call__(self, *args: Any, **named: Any) -> Fake:
        print("* something about", self._path)
        return super().__call__(*args, **named)


@pytest.mark.parametrize("name", names())
def test_what_a_package_prints_leaves_stdout_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for package in (*PACKAGES, *TENSORBOARD):
        module = FakeModule(package, [])
        module._fake = Loud([], package)
        monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setattr(Fake, "__getattr__", lambda self, inner: Loud(self._calls, f"{self._path}.{inner}"))
    trackers = Trackers.start([name], run_name="r", config=CONFIG, directory=tmp_path, warn=pytest.fail)
    for record in run(20):
        trackers.log(record)
    trackers.close()
    out, err = capsys.readouterr()
    assert out == "" and err.count("* something about") > 3


def test_trackio_is_told_itself_that_the_run_is_over(calls: list[Any], tmp_path: Path) -> None:
    """Else it ends the run again, and prints so, as Python exits: after the last line of --json."""
    build("trackio").start("r", CONFIG, tmp_path).close()
    assert calls[-1][0] == "trackio.finish"


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs the extra trackio")
def test_real_trackio_says_nothing_on_stdout_even_as_python_exits(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from gossamer.view.tracking import Trackers; from view.streams import run\n"
        "trackers = Trackers.start(['trackio'], run_name='r', config={}, directory=Path(), warn=print)\n"
        "for record in run(20): trackers.log(record)\n"
        "trackers.close(); print('last')"
    )
    path = os.pathsep.join(sys.path)
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "last\n"), done.stderr


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the extra tensorboard")
def test_real_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    session = build("tensorboard").start("r", CONFIG, tmp_path)
    for record in run(60):
        session.log(record)
    session.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == list(range(1, 61))
    assert [event.step for event in reader.Scalars("validation/loss")] == [50]
