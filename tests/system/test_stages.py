"""A run in stages as a user starts it, and what becomes of it in one process: sampled from, exported, resumed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gossamer.api import verbs
from system.command import InThisProcess, Place, losses, records
from system.conftest import Trained, policed


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """The run of the fixture `trained`, in two stages. Read only."""
    for place in policed(tmp_path_factory.mktemp("staged") / "place"):
        config = place.config(train={"steps": 6}, machines={"processes": 2}, plan={"mesh": {"pipe": 2}})
        done = place.run("train", config, "--json")
        assert done.code == 0, done.out[-3000:] + done.err[-3000:]
        (run,) = place.runs()
        yield Trained(place, done, run)


def test_it_is_the_run_of_whole_models(staged: Trained, trained: Trained) -> None:
    assert losses(staged.run) == pytest.approx(losses(trained.run), rel=1e-5)
    forecast = staged.done.last()["forecast"]["wire_bytes"]
    mine = {link: count for link, count in forecast.items() if link.startswith("0>")}
    assert [step["wire_bytes"] for step in records(staged.run, "step")] == [mine] * 6


def test_it_was_proved_before_its_first_step(staged: Trained) -> None:
    (proof,) = records(staged.run, "proof")
    assert (proof["outcome"], proof["tensors"]) == ("equal", proof["proved"])
    assert proof["message"].startswith("2 micro-batches: 2 stages = 1 process, loss ")
    assert (staged.run / "proved.json").exists()


def test_one_process_goes_on_with_a_text(staged: Trained, inside: InThisProcess) -> None:
    said = inside.good(staged.place, "sample", staged.run, "stone river", "--max-new-tokens", "12", "--json").last()
    assert said["prompt"] == "stone river"
    assert said["text"]


def test_the_export_holds_what_every_stage_has_learnt(
    staged: Trained, trained: Trained, place: Place, monkeypatch: pytest.MonkeyPatch, inside: InThisProcess
) -> None:
    from transformers import AutoModelForCausalLM

    target = place.folder / "exported"
    inside.good(staged.place, "export", staged.run, "--to", "hf", target)
    exported = AutoModelForCausalLM.from_pretrained(target).eval()
    monkeypatch.chdir(staged.place.folder)
    ours = verbs.load(staged.run).module
    ids = torch.arange(24).view(2, 12) * 7 % 257
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, exported(input_ids=ids).logits)
    monkeypatch.chdir(trained.place.folder)
    whole = verbs.load(trained.run)
    assert whole.origin is not None
    initial = dict(whole.origin.build(whole.config.train.seed).named_parameters())
    for name, parameter in whole.module.named_parameters():
        learnt = float((parameter - initial[name]).detach().abs().max())
        apart = float((exported.get_parameter(name) - parameter).detach().abs().max())
        assert apart < 0.02 * learnt, f"{name}: {apart} apart, of {learnt} that it moved"
