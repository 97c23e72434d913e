"""The start folders of phases: what goes on from the run before, and which ones are made anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer.api import verbs
from gossamer.api.phased_run import _prepare
from gossamer.api.transitions import StartRequest, make_start
from gossamer.job.continued_model import write_continued
from gossamer.job.pruned_model import PruneRequest, prune_model
from gossamer.job.quantization import QuantizeRequest, quantize_model
from gossamer.model.export import export_hf
from gossamer.model.origin import origin_of
from gossamer.settings import load
from gossamer.settings.phases import Phase, phases_of
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from gossamer.store.start_folder import StartFolder
from gossamer.view.run_directory import RunDirectory
from grow.grow_models import LLAMA, llama, logits, spread_out

SIZES = {**LLAMA, "vocab_size": 257}
WIDE = {**SIZES, "hidden_size": 40}
EPS = pytest.approx(1e-6 * 24 / 40)
MAGNITUDE = {"magnitude": {"sparsity": 0.5}}


def sections(folder: Path, **train: Any) -> dict[str, Any]:
    (folder / "text.txt").write_text("the river walks slowly under a green lamp " * 60)
    return {
        "train": {"steps": 2, "batch": 2, "evaluate_every": 0, "checkpoint_every": 0, **train},
        "data": {"source": f"text:{folder}/text.txt", "sequence": 16, "validation": 0.0},
        "run": {"directory": str(folder / "runs"), "display": "quiet"},
    }


def trained(folder: Path, model: dict[str, Any], **train: Any) -> Path:
    return Path(gossamer.train(model, None, sections(folder, **train)).run.path)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model that was grown to a width that is no multiple, so that its epsilon is another one."""
    folder = tmp_path_factory.mktemp("grown")
    torch.manual_seed(0)
    export_hf(spread_out(llama(**SIZES)), None, None, folder / "small")
    config = folder / "large.yaml"
    config.write_text(f"model: {{hf: llama, config: {WIDE!r}}}\ntrain: {{steps: 20}}\ndata: {{sequence: 16}}\n")
    verbs.grow(folder / "small", config, out=folder / "start")
    return trained(folder, {"hf": "llama", "config": WIDE, "start": str(folder / "start")})


@pytest.mark.parametrize("made", ["continued", "pruned"])
def test_a_changed_epsilon_goes_on(grown: Path, tmp_path: Path, made: str) -> None:
    out = tmp_path / "out"
    if made == "continued":
        write_continued(grown, out)
    else:
        prune_model(PruneRequest(source=grown, by=MAGNITUDE, sequences=1, out=out))
    start = StartFolder(out)
    assert start.config_keys == {"rms_norm_eps": EPS} and start.attributes["model.norm.variance_epsilon"] == EPS
    built = origin_of(ModelSection(hf="llama", config=WIDE, start=str(out))).build(0)
    assert built.model.norm.variance_epsilon == EPS
    if made == "continued":
        assert torch.equal(logits(built), logits(gossamer.load(grown).module))


def test_the_epsilon_of_a_module_of_ones_own_is_not_lost_in_integers(grown: Path, tmp_path: Path) -> None:
    """A quantized folder says it in config.json, which a module of one's own does not have."""
    from gossamer.job.quantization import _check_says_eps
    from grow.grow_models import Plain

    start = StartFolder(grown.parent.parent / "start")
    _check_says_eps(llama(), start)
    with pytest.raises(BadInput, match=r"config says the epsilon .* got Plain with model\.layers\.0"):
        _check_says_eps(Plain(), start)


def test_masks_go_on_where_their_zeros_were_kept(tmp_path: Path) -> None:
    model: dict[str, Any] = {"hf": "llama", "config": SIZES}
    dense = trained(tmp_path, model)
    prune_model(PruneRequest(source=dense, by=MAGNITUDE, sequences=1, out=tmp_path / "sparse"))
    masks = dict(StartFolder(tmp_path / "sparse").masks())
    model["start"] = str(tmp_path / "sparse")
    kept = trained(tmp_path, model, optimizer={"static_mask": {"masks": "start"}})
    write_continued(kept, tmp_path / "kept")
    found = dict(StartFolder(tmp_path / "kept").masks())
    assert found.keys() == masks.keys() and all(torch.equal(found[name], mask) for name, mask in masks.items())
    filled = trained(tmp_path, model)
    said = write_continued(filled, tmp_path / "filled")
    assert not dict(StartFolder(tmp_path / "filled").masks()) and said["masks_trained_over"] == len(masks)
    config = tmp_path / "deeper.yaml"
    config.write_text(f"model: {{hf: llama, config: {SIZES | {'num_hidden_layers': 4}!r}}}\n")
    remarks = verbs.grow(kept, config, "g_stack", dry_run=True)["remarks"]
    assert any("the masks of" in one and "left out" in one for one in remarks)


def test_a_start_folder_that_was_made_otherwise_is_made_anew(tmp_path: Path) -> None:
    model: dict[str, Any] = {"hf": "llama", "config": SIZES}
    run = trained(tmp_path, model)
    target = load(None, given={"model": model, **sections(tmp_path)}).config
    out = tmp_path / "starts" / "02-next"

    def made(by: Any, **changed: Any) -> Any:
        new = target.model_copy(update={"model": target.model.model_copy(update=changed)})
        make_start(StartRequest(by=by, source=run, target=new, out=out))
        return StartFolder(out).method, (out / "start.json").stat().st_mtime_ns

    first = made(None)
    assert first[0] == "continue" and made(None) == first, "what was made so is there"
    pruned = made(MAGNITUDE)
    assert pruned[0] == MAGNITUDE and made({"magnitude": {"sparsity": 0.5}}) == pruned
    other = made({"magnitude": {"sparsity": 0.25}})
    assert other[0] == {"magnitude": {"sparsity": 0.25}} and other[1] != pruned[1]
    assert made({"magnitude": {"sparsity": 0.25}}, adapter={"lora": {"rank": 2}}) == other, "made beside it"
    (out.parent / ".02-next.json").unlink()  # by an earlier version
    assert made(None)[0] == "continue"
    for layers in (4, 6):  # the same method, another target
        assert made("g_stack", config={**SIZES, "num_hidden_layers": layers})[0] == "g_stack"
        assert f"model.layers.{layers - 1}.mlp.up_proj.weight" in StartFolder(out).kinds()


@pytest.fixture(scope="module")
def sided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sided")
    return trained(folder, {"hf": "llama", "config": {**SIZES, "num_hidden_layers": 3}, "side": "unipt"})


def test_a_side_network_is_not_dropped_in_silence(sided: Path, tmp_path: Path) -> None:
    config = tmp_path / "deeper.yaml"
    config.write_text(f"model: {{hf: llama, config: {SIZES | {'num_hidden_layers': 6}!r}}}\n")
    for call in (
        lambda: verbs.grow(sided, config, "g_stack", dry_run=True),
        lambda: prune_model(PruneRequest(source=sided, by=MAGNITUDE)),
        lambda: quantize_model(QuantizeRequest(source=sided, by="round_to_nearest")),
    ):
        with pytest.raises(BadInput, match=r"whole model.* a side network.* would be lost.*trained beside"):
            call()


def test_moments_of_a_run_that_trained_a_part_are_left_out(tmp_path: Path) -> None:
    run = trained(tmp_path, {"hf": "llama", "config": SIZES, "freeze": ["norm"]})
    config = tmp_path / "wide.yaml"
    config.write_text(f"model: {{hf: llama, config: {SIZES | {'hidden_size': 48}!r}}}\n")
    data = verbs.grow(run, config, dry_run=True)
    assert data["moments"] == [] and any("no state of model.layers.0.input_layernorm" in one for one in data["remarks"])


def test_special_token_ids_are_those_of_the_source(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = {"bos_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": 6}
    export_hf(llama(**SIZES, **ids), None, None, tmp_path / "small")
    config = tmp_path / "large.yaml"
    config.write_text(f"model: {{hf: llama, config: {WIDE!r}}}\n")
    verbs.grow(tmp_path / "small", config, out=tmp_path / "out")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for held in (module.config, module.generation_config):
        assert {key: getattr(held, key) for key in ids} == ids
    config.write_text(f"model: {{hf: llama, config: {WIDE | {'eos_token_id': 3}!r}}}\n")
    verbs.grow(tmp_path / "small", config, out=tmp_path / "written")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "written").config.eos_token_id == 3


def test_making_a_start_is_said_and_how_a_phase_began_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"model": {"hf": "llama", "config": SIZES}, **sections(tmp_path)}
    run = trained(tmp_path, given["model"])

    def phases(by: Any) -> tuple[Phase, Phase]:
        train = {**given["train"], "phases": [{"name": "a"}, {"name": "b", "by": by}]}
        resolved = load(None, given={**given, "train": train, "run": {"display": "plain"}})
        first, second = phases_of(resolved, tmp_path / "RUN")
        return replace(first, directory=RunDirectory(run)), second

    first, second = phases({"magnitude": {"include": ["nothing"]}})
    with pytest.raises(BadInput, match=r"^train\.phases\.1\.by: include: no linear layer is called 'nothing'"):
        _prepare(second, first)
    first, second = phases(MAGNITUDE)
    _prepare(second, first)
    said = capsys.readouterr().out
    begun, made = "phase b: its start, magnitude, of the weights of phase a", "phase b: matrices pruned, 7 of 14"
    assert said.rindex(begun) < said.index(made)
    second.directory.path.mkdir(parents=True)
    second.directory.config_file.write_text("begun")
    _prepare(second, first)
    first, changed = phases({"magnitude": {"sparsity": 0.25}})
    with pytest.raises(BadInput, match=r"train\.phases\.1\.by: wanted the method by which phase b began, .*0\.5"):
        _prepare(changed, first)
