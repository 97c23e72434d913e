"""`gossamer train --on ray` on a real Ray cluster of two nodes of one processor each, both on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gossamer.launch import launch_ray
from gossamer.spec.errors import BadInput

ray_utils = pytest.importorskip("ray.cluster_utils")

CONFIG = """
model:
  hf: llama
  config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2,
           max_position_embeddings: 64, tie_word_embeddings: true}
data: {source: "text:*.txt", tokenizer: byte, sequence: 32}
train: {steps: 6, batch: 4, evaluate_every: 0}
plan: {exchange: dense}
run: {name: on-ray}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    kept = {"object_store_memory": 80 << 20, "num_cpus": 1}
    found = ray_utils.Cluster(initialize_head=True, head_node_args={**kept, "include_dashboard": False})
    found.add_node(**kept)
    yield found
    found.shutdown()


class Site:
    """A folder with a run.yaml and a text, and the command in it."""

    def __init__(self, folder: Path, cluster: Any) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self.env = {**os.environ, "RAY_ADDRESS": cluster.address}
        (folder / "run.yaml").write_text(CONFIG)
        (folder / "text.txt").write_text("letters and words, " * 400)

    def start(self, *overrides: str, nodes: int = 2) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gossamer", "train", "run.yaml", *overrides, "--on", "ray"]
        process = subprocess.Popen(
            [*command, "--nnodes", str(nodes), "--json"],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def records(self) -> list[dict[str, Any]]:
        found = self.folder.glob("runs/*/records.jsonl")
        return [json.loads(line) for file in found for line in file.read_text().splitlines()]

    def when_step(self, number: int, process: subprocess.Popen[str], act: Callable[[], object]) -> tuple[str, str]:
        """Do something once a step is recorded; return what the command wrote to its outputs."""
        end_s = time.monotonic() + 180
        while not any(record["kind"] == "step" and record["step"] >= number for record in self.records()):
            if process.poll() is not None or time.monotonic() > end_s:
                process.kill()
                pytest.fail("\n".join(process.communicate()))
            time.sleep(0.1)
        act()
        return process.communicate(timeout=180)

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def site(tmp_path: Path, cluster: Any) -> Iterator[Site]:
    found = Site(tmp_path, cluster)
    yield found
    found.end()


@pytest.mark.slow
def test_two_nodes_train_one_run(site: Site) -> None:
    process = site.start()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    start, *_, end = site.records()
    assert (start["ranks"], start["hosts"]) == (2, [0, 1])  # a rank on each node
    assert (end["outcome"], end["step"]) == ("done", 6)
    assert "done       step 6" in out


@pytest.mark.slow
def test_a_stop_saves_on_all_nodes(site: Site) -> None:
    process = site.start("train.steps=100000")
    out, err = site.when_step(5, process, lambda: process.send_signal(signal.SIGINT))
    assert process.returncode == 4, out + err
    saved, end = site.records()[-2:]
    assert (saved["kind"], end["outcome"]) == ("checkpoint", "interrupted") and saved["step"] == end["step"]


def test_a_cluster_with_too_few_nodes_is_refused(site: Site) -> None:
    process = site.start(nodes=3)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    said = json.loads(out.splitlines()[-1])["error"]
    assert said.startswith(
        "--nnodes: wanted 3 nodes of at least 1 CPUs, one for each process, got 2 in the Ray cluster"
    )
    assert not list(site.folder.glob("runs/*"))


def test_no_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("ray.init", lambda **given: (_ for _ in ()).throw(ConnectionError("could not connect")))
    with pytest.raises(BadInput, match=r"wanted a running Ray cluster, got none at 127\.0\.0\.1:1"):
        launch_ray(2, 1, ["train"])


@pytest.mark.slow
def test_a_preempted_node_is_named(site: Site, cluster: Any) -> None:
    process = site.start("train.steps=100000")
    worker, *_ = cluster.worker_nodes
    out, err = site.when_step(5, process, lambda: cluster.remove_node(worker, allow_graceful=False))
    assert process.returncode == 3, out + err
    assert "its actor was lost or preempted" in out + err
