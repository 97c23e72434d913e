"""Fixtures all tests share: the worker pool, and the police against leaks."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Iterator

# One thread here as in the pool's workers: matrix products of other numbers of threads differ in their last bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read as torch is imported

import pytest
import torch

from pool import Pool

if not torch.cuda.is_available():  # kernels are interpreted, where triton is installed; it asks as it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """What the tests import stays: half a million objects, that the collector of cycles need not go through again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Pre-imported workers for jobs over process groups."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread of ours, no child process and no network namespace survives a test."""
    if "pool" in request.fixturenames:
        request.getfixturevalue("pool")
    threads = set(threading.enumerate())
    spaces = _namespaces()
    children = _children()
    environment = dict(os.environ)
    yield
    left = [
        t.name for t in threading.enumerate() if t not in threads and t.is_alive() and t.name.startswith("gossamer")
    ]
    assert not left, f"threads left running: {left}"
    assert _namespaces() <= spaces, f"network namespaces left: {_namespaces() - spaces}"
    if "pool" not in request.fixturenames:  # the pool's own workers start inside the first test that needs them
        more = _children() - children
        assert not more, f"child processes left: {sorted(more)}"
    # transformers sets torch's cache folder when its models are imported
    changed = {k for k in os.environ if os.environ[k] != environment.get(k)} - {
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
    }
    assert not changed, f"environment left changed: {sorted(changed)}"


def _namespaces() -> set[str]:
    """Labs of this process, and of processes that are gone; another test run's labs are its own affair."""
    try:
        found = os.listdir("/var/run/netns")
    except OSError:
        return set()
    owners = {name: match.group(1) for name in found if (match := re.match(r"gsm(\d+)x", name))}
    left = {n for n, pid in owners.items() if int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}")}
    return left & set(os.listdir("/var/run/netns"))  # a lab that ended meanwhile has removed its own


def _children() -> set[str]:
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
            return set(file.read().split())
    except OSError:
        return set()
