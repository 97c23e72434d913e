"""The method that CONTRIBUTING.md writes: added to a copy of the package, it is found, passes its contract, trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


@pytest.mark.nightly
def test_the_optimizer_of_the_page_is_one_file_and_nothing_else(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    (place,) = re.findall(r"Saved as `src/(gossamer/optimizer/clipped_sgd\.py)`", PAGE)
    shutil.copytree(Path(gossamer.__file__).parent, tmp_path / "gossamer")
    (tmp_path / place).write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def ran(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    assert "arXiv:1912.03194" in ran("gossamer", "methods", "optimizer", "clipped_sgd")
    said = ran("pytest", "-p", "no:cacheprovider", "tests/contracts/test_rule.py", "-k", "clipped_sgd")
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 3, said
    check = f"import gossamer; assert gossamer.__file__.startswith({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", check], env=environment, check=True)


def test_commands_of_the_page_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"(?:^|`)make (\w+)", PAGE, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for path in re.findall(r"`((?:tests|docs|benchmarks|spec|launch|cli|api)/[\w/.]*\w(?:\.py|\.md)?/?)`", PAGE):
        if "NAME" not in path and "FOLDER" not in path:
            assert (ROOT / path).exists() or (ROOT / "src" / "gossamer" / path).exists(), path
