"""Which types there are: a causal language model is called as transformers calls it, others `class/type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# class -> the mapping of transformers that lists its types
CLASSES = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "vision": "IMAGE_CLASSIFICATION",
    "ctc": "CTC",
    "audio": "AUDIO_CLASSIFICATION",
    "speech": "SPEECH_SEQ_2_SEQ",
}


def kinds_of(name: str) -> list[str]:
    """Every type of a class."""
    return [kind if name == "causal" else f"{name}/{kind}" for kind in _mapping(name)]


def class_of(kind: str) -> str:
    return kind.rpartition("/")[0] or "causal"


def model_class(kind: str) -> Any:
    import transformers

    name = _mapping(class_of(kind))[kind.rpartition("/")[2]]
    return getattr(transformers, name[0] if isinstance(name, tuple) else name)


def config_class(kind: str) -> Any:
    import transformers

    return model_class(kind).config_class or transformers.CONFIG_MAPPING[kind.rpartition("/")[2]]


def _mapping(name: str) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, f"MODEL_FOR_{CLASSES[name]}_MAPPING_NAMES"))
