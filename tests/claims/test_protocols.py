"""The protocols of benchmarks/claims on measurements that are made up, and the harness around them."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gossamer.spec.errors import BadInput

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "claims"


@pytest.fixture(scope="module")
def parts() -> Iterator[dict[str, ModuleType]]:
    """By their files, under the names by which they import each other: a package called claims is here, too."""
    before = {name: one for name, one in sys.modules.items() if name.startswith("claims._")}
    found = {}
    for name in ("_trials", "_grid", "_frozen", "_languini"):
        spec = importlib.util.spec_from_file_location(f"claims.{name}", FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        found[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    yield found
    for name in found:
        del sys.modules[f"claims.{name}"]
    sys.modules.update(before)


class Held(dict[str, Any]):
    def put(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))


def trials(parts: Mapping[str, ModuleType], shelf: Held) -> Any:
    return parts["_trials"].Trials(lambda study: shelf, "p.s", commit="a", until=math.inf, tell=lambda text: None)


def test_values_are_tuned_on_one_family_and_reported_on_the_other(parts: dict[str, ModuleType]) -> None:
    """The best value of the tuning data is another than that of the reporting data: the first is frozen."""
    frozen, seen = parts["_frozen"], []
    best = {"digits": 1.0, "letters": 4.0}

    def run(value: float, data: str, seed: int) -> dict[str, float]:
        seen.append((data, seed))
        return {"loss": math.log2(value / best[data]) ** 2 + 0.01 * seed, "parameters": 7}

    tuning = frozen.Family(data="digits", seeds=(0, 1))
    protocol = frozen.Frozen(tuned_on=tuning, reported_on=frozen.Family(data="letters", seeds=(0, 1, 2)))
    found = protocol({"one": run, "two": run}, {"one": 1.0, "two": 2.0}, trials(parts, Held()))
    assert found["one"].tuned.best == found["two"].tuned.best == 1.0
    assert found["one"].losses == pytest.approx([4.0, 4.01, 4.02])
    assert found["one"].told()["runs"][0]["parameters"] == 7
    data = [name for name, _ in seen]
    assert data == sorted(data), "nothing is reported before everything is tuned"
    assert len(found["one"].tuned.tried) == len(found["two"].tuned.tried)


def test_families_with_seeds_of_their_own_are_disjoint_and_others_are_refused(parts: dict[str, ModuleType]) -> None:
    family, frozen = parts["_frozen"].Family, parts["_frozen"].Frozen
    one = family(data="digits", seeds=(0, 1, 2))
    frozen(tuned_on=one, reported_on=family(data="digits", seeds=(3, 4)))
    with pytest.raises(BadInput, match="digits with seeds 2"):
        frozen(tuned_on=one, reported_on=family(data="digits", seeds=(2, 3)))


def test_the_same_contents_under_another_name_are_refused(parts: dict[str, ModuleType]) -> None:
    family, frozen = parts["_frozen"].Family, parts["_frozen"].Frozen
    one, other = (family(data=name, seeds=(0,), digest="d1") for name in ("digits", "numbers"))
    with pytest.raises(BadInput, match="digits with seeds 0"):
        frozen(tuned_on=one, reported_on=other)
    frozen(tuned_on=one, reported_on=family(data="numbers", seeds=(0,), digest="d2"))


def test_a_row_that_was_tuned_on_what_it_reports_is_refused_whoever_wrote_it(parts: dict[str, ModuleType]) -> None:
    check = parts["_frozen"].check_rows
    good = {"tuned_on": {"data": "a", "seeds": [0]}, "reported_on": {"data": "b", "seeds": [0]}}
    check("x.y", [good, {}])
    with pytest.raises(BadInput, match=r"x\.y.*tuned on a with seeds 0"):
        check("x.y", [good | {"reported_on": {"data": "a", "seeds": [0, 1]}}])
    with pytest.raises(BadInput, match="tuned_on alone"):
        check("x.y", [{"tuned_on": good["tuned_on"]}])


class Made:
    """A method whose throughput peaks at one batch size, and whose loss follows a power law of the seconds."""

    def __init__(self, parts: Mapping[str, ModuleType], name: str, a: float, k: float, best_rate: float) -> None:
        self.a, self.k, self.best_rate = a, k, best_rate
        self.trained: list[tuple[int, int]] = []
        make = parts["_languini"].Contender
        self.contender = make(
            name=name, throughput=self.throughput, train=self.train, batches=(4, 16, 64), rate=best_rate * 2
        )

    def throughput(self, batch: int) -> float:
        return {4: 500.0, 16: 1000.0, 64: 800.0}[batch]

    def train(self, batch: int, tokens: int, rate: float, seed: int) -> dict[str, float]:
        self.trained.append((batch, tokens))
        seconds = tokens / self.throughput(batch)
        worse = 0.1 * math.log2(rate / self.best_rate) ** 2
        return {"bits_per_byte": self.a * seconds**-self.k + worse, "seconds": seconds}


def test_classes_are_seconds_at_the_best_batch_size(parts: dict[str, ModuleType]) -> None:
    languini = parts["_languini"]
    one, other = Made(parts, "one", 4.0, 0.1, 1e-3), Made(parts, "other", 8.0, 0.2, 1e-2)
    assert languini.CLASSES == (30, 60, 120, 240)
    found = languini.scaled([one.contender, other.contender], trials(parts, Held()), seeds=2)
    assert {batch for batch, _ in one.trained} == {16}
    assert {tokens for _, tokens in one.trained} == {30_000, 60_000, 120_000, 240_000}
    scale = found["one"]
    assert scale.is_in_time and scale.tokens_per_s == 1000.0
    assert scale.rates.best == pytest.approx(1e-3), "tuned at the shortest class"
    assert scale.trend == pytest.approx((4.0, 0.1))
    assert all(len(each) == 2 for each in scale.bits.values())
    assert languini.crossing(scale, found["other"]) == pytest.approx(2.0**10), "4 c^-0.1 = 8 c^-0.2"


def test_a_throughput_that_was_measured_without_the_whole_loop_shows(parts: dict[str, ModuleType]) -> None:
    one = Made(parts, "one", 4.0, 0.1, 1e-3)
    honest = one.train
    slow = parts["_languini"].Contender(
        name="slow",
        throughput=one.throughput,
        train=lambda *given: honest(*given) | {"seconds": honest(*given)["seconds"] * 1.3},
        batches=(16,),
        rate=1e-3,
    )
    scale = parts["_languini"].scaled([slow], trials(parts, Held()), classes=(1, 2))["slow"]
    assert not scale.is_in_time and scale.told()["in_time"] is False


_STUDY = """
from claims import Row, Study
from claims._frozen import Family, Frozen


def row(ratio, details):
    return Row(method="m", claim="c", baseline="b", ratio=ratio, paper_ratio=None, setting="s", holds=True,
               ratio_without_source=None if ratio > 1 else ratio / 2, details=details)


def bad(trials):
    one = {"data": "a", "seeds": [0]}
    return [row(1.0, {"tuned_on": one, "reported_on": one})]


def studies(*, quick):
    return [
        Study("late", lambda trials: [row(trials("n", lambda: 2.0), {})]),
        Study("first", lambda trials: [row(trials("n", lambda: 1.0), {})], worth=2),
        Study("bad", bad),
        Study("long", lambda trials: [], not_quick="takes an hour"),
    ]
"""


def test_the_harness_runs_by_worth_and_says_what_did_not_run(tmp_path: Path) -> None:
    """A folder of studies beside claims, in a process: order, record, refusal, and a second time from the journal."""
    for name in ("claims", "links", "result.py"):
        (tmp_path / name).symlink_to(ROOT / "benchmarks" / name)
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__init__.py").write_text("")
    (tmp_path / "toy" / "made.py").write_text(_STUDY)
    code = (
        "import sys, result; from pathlib import Path; result.RESULTS = Path('results');"
        "from claims._main import main; main('', folder='toy', unit='METHOD', hours=1.0)"
    )
    words = [sys.executable, "-c", code, "--quick", "--json", "--cache", str(tmp_path / "cache"), "--commit", "abc"]
    done = [subprocess.run(words, capture_output=True, text=True, cwd=tmp_path) for _ in range(2)]
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert done[0].stderr.index("made.first/n") < done[0].stderr.index("made.late/n")
    assert "made." not in done[1].stderr, "measured once"
    kept = json.loads((tmp_path / "results" / "toy_quick.json").read_text())
    assert [(one["study"], one.get("ratio_without_source", "-")) for one in kept["rows"]] == [
        ("late", "-"),
        ("first", 0.5),
    ]
    assert set(kept["left_out"]) == {"made.bad", "made.long"}
    assert "tuned on a with seeds 0" in kept["left_out"]["made.bad"]
    assert json.loads(done[1].stdout.splitlines()[-1])["rows"] == kept["rows"]


def test_no_row_of_a_record_was_tuned_on_what_it_reports(parts: dict[str, ModuleType]) -> None:
    records = [file for file in (ROOT / "docs" / "results").glob("*.json") if file.stem in ("claims", "grow_shrink")]
    for file in records:
        for row in json.loads(file.read_text("utf-8"))["rows"]:
            parts["_frozen"].check_rows(f"{row['paper']}.{row['study']}", [row["details"]])
    assert records


def test_rows_are_of_the_seeds_that_all_methods_trained(parts: dict[str, ModuleType]) -> None:
    spec = importlib.util.spec_from_file_location("small_states", ROOT / "benchmarks" / "savers" / "small_states.py")
    assert spec is not None and spec.loader is not None
    states = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(states)
    ran: list[tuple[str, int]] = []

    def trained(name: str, seed: int, tokens: int) -> dict[str, float]:
        ran.append((name, seed))
        return {"loss": float(seed)}

    states.trained = trained
    held = Held()

    def trials(until: int) -> Any:
        return parts["_trials"].Trials(
            lambda _: held, "savers.training", commit="c", until=until, clock=lambda: len(ran), tell=lambda _: None
        )

    with pytest.raises(parts["_trials"].OutOfTime):
        states.in_turns(("adamw", "coat"), (0, 1, 2), 10, trials(1))
    found = states.in_turns(("adamw", "coat"), (0, 1, 2), 10, trials(3))
    assert found == {"adamw": [{"loss": 0.0}], "coat": [{"loss": 0.0}]}, "seed 1 has adamw alone"
    assert states.told([0], [0, 1, 2]) == "1 of 3 seeds"
    found = states.in_turns(("adamw", "coat"), (0, 1, 2), 10, trials(99))
    assert [one["loss"] for one in found["coat"]] == [0.0, 1.0, 2.0]
    assert sorted(ran) == sorted({*ran}), "no run is made twice"
