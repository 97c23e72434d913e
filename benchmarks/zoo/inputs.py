"""Batches for any model type: made from its class, its config and the names of its forward's arguments.

What a config does not say (how long a recording must be, which dim holds the channels) is found by trying: `forms`
gives the shapes that are usual, and the caller takes the first with which the model runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, SEQUENCE, ANSWER, PADDING = 2, 16, 9, 5
SIDES = (32, 64, 224)  # of images
FRAMES = (64, 128, 256, 512)  # of a spectrogram
SAMPLES = (4000, 16000)  # of a recording
_BANDS = re.compile(
    r".*mel_bins|.*num_mels?|.*n_mels|input_feat_per_channel|feature_projection_input_dim|input_dim|.*_mel"
)


@dataclass(frozen=True)
class Form:
    """What the batches of one model look like. Shapes count rows first."""

    main: str
    shape: tuple[int, ...]
    vocabulary: int  # numbers of the main input are below; 0: it is real numbers
    answer: tuple[int, ...]  # shape of the labels
    classes: int  # labels are below
    length: int = 0  # dim 1 of the mask; 0: there is none
    decodes: bool = False  # the labels, one later, are an input too
    zeros: tuple[tuple[str, tuple[int, ...]], ...] = ()  # other inputs, all zeros
    image: tuple[int, ...] = ()  # beside the text


def batch_of(form: Form, *, seed: int, padded: bool) -> dict[str, Tensor]:
    """The same for the same seed. `padded`: the first row is shorter, where there is a mask."""
    generator = torch.Generator().manual_seed(seed)
    if form.vocabulary:
        main = torch.randint(min(5, form.vocabulary - 1), form.vocabulary, form.shape, generator=generator)
    else:
        main = torch.randn(form.shape, generator=generator)
    labels = torch.randint(min(1, form.classes - 1), form.classes, form.answer, generator=generator)
    if form.vocabulary and form.answer == form.shape:
        labels = main.clone()
    batch = {form.main: main, "labels": labels}
    if form.length:
        batch["attention_mask"] = torch.ones(form.shape[0], form.length, dtype=torch.long)
    if form.length and padded:
        batch["attention_mask"][0, -PADDING:] = 0
        if labels.dim() > 1:
            labels[0, -PADDING if form.answer == form.shape else -2 :] = -100
    if form.decodes:
        batch["decoder_input_ids"] = F.pad(labels[:, :-1].clamp(min=0), (1, 0))
    if form.image:
        batch["pixel_values"] = torch.randn(form.image, generator=generator)
    return batch | {name: torch.zeros(shape, dtype=torch.long) for name, shape in form.zeros}


def forms(task: str, config: Any, main: str, parameters: Mapping[str, Any]) -> Iterator[Form]:
    """The likeliest first."""
    for form in _inputs(task, config, main):
        decodes = "decoder_input_ids" in parameters
        shaped = replace(form, **_answer(_heads_task(task, form, decodes), config, form))
        shaped = replace(shaped, decodes=decodes and task in ("seq2seq", "speech"))
        yield shaped
        others = [n for n in parameters if n.endswith("_ids") and n not in (form.main, "decoder_input_ids")]
        if form.vocabulary and others:
            yield replace(shaped, zeros=tuple((n, _shape_of_ids(n, shaped)) for n in others if n != "position_ids"))
        if form.vocabulary and "pixel_values" in parameters:
            yield from (replace(shaped, image=image) for image in _images(_known(config)))


def _shape_of_ids(name: str, form: Form) -> tuple[int, ...]:
    return form.shape if name == "token_type_ids" else form.shape[:1]


def _inputs(task: str, config: Any, main: str) -> Iterator[Form]:
    known = _known(config)
    plain = Form(main, (), 0, (), 0)
    if main == "pixel_values":
        yield from (replace(plain, shape=image) for image in _images(known))
    elif main == "input_ids":
        vocabulary = _vocabulary(config)
        yield Form("input_ids", (ROWS, SEQUENCE), vocabulary, (), 0, length=SEQUENCE)
        books = _first(known, r"num_codebooks", 0)
        if books:
            yield Form("input_ids", (ROWS * books, SEQUENCE), vocabulary, (), 0)
    else:
        yield from _sounds(known, plain)


def _sounds(known: Mapping[str, Any], plain: Form) -> Iterator[Form]:
    bands = dict.fromkeys(v for k, v in known.items() if _BANDS.fullmatch(k) and isinstance(v, int))
    lengths = dict.fromkeys((*FRAMES, *_frames(known)))
    bands |= dict.fromkeys(times * band for times in (2, 4) for band in bands)
    waves = [(ROWS, n) for n in SAMPLES]
    spectra = [s for n in lengths for b in (*bands, 80) for s in ((ROWS, n, b), (ROWS, b, n))]
    shapes = [*spectra, *waves] if "features" in plain.main else [*waves, *spectra]
    for shape in dict.fromkeys(shapes):
        for length in dict.fromkeys((*shape[1:2], *shape[2:], 0)):
            yield replace(plain, shape=shape, length=length)


def _images(known: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    channels = _first(known, r"num_channels|in_channels|in_chans|num_image_channels", 3)
    yield from ((ROWS, channels, side, side) for side in dict.fromkeys((*_sides(known), *SIDES)))


def _sides(known: Mapping[str, Any]) -> list[int]:
    found = [v for k, v in known.items() if re.fullmatch(r".*image_size|input_size|img_size|crop_size", k)]
    return [v[0] if isinstance(v, list | tuple) and v else v for v in found if v and not isinstance(v, dict)]


def _frames(known: Mapping[str, Any]) -> list[int]:
    """Lengths that a config asks for: a spectrogram's, or twice the positions after a convolution of stride 2."""
    said = [v for k, v in known.items() if k in ("max_length", "spec_size") and isinstance(v, int) and v > 32]
    return said + [2 * v for k, v in known.items() if k == "max_source_positions" and isinstance(v, int)]


def _heads_task(task: str, form: Form, decodes: bool) -> str:
    """A type without a decoder of its own answers as a language model does."""
    return "causal" if task in ("seq2seq", "speech") and form.vocabulary and not decodes else task


def _answer(task: str, config: Any, form: Form) -> dict[str, Any]:
    if task in ("vision", "audio"):
        return {"answer": form.shape[:1], "classes": max(2, getattr(config, "num_labels", 2))}
    vocabulary = form.vocabulary or _vocabulary(config)
    if task == "ctc":
        return {"answer": (ROWS, 3), "classes": vocabulary}
    if task in ("seq2seq", "speech"):
        return {"answer": (ROWS, ANSWER), "classes": vocabulary}
    if form.shape[0] != ROWS:
        return {"answer": (ROWS, form.shape[1], form.shape[0] // ROWS), "classes": vocabulary}
    return {"answer": form.shape, "classes": vocabulary}


def _vocabulary(config: Any) -> int:
    inner = config.get_text_config(decoder=True)
    return getattr(inner, "vocab_size", None) or getattr(config, "vocab_size", None) or 2


def _known(config: Any) -> dict[str, Any]:
    """Keys of a config and of the configs in it, the outer ones first."""
    known = dict(config.to_dict())
    for inner in [v for v in known.values() if isinstance(v, dict)]:
        known = {**{k: v for k, v in inner.items() if not isinstance(v, dict)}, **known}
    return {k: v for k, v in known.items() if isinstance(k, str)}


def _first(known: Mapping[str, Any], pattern: str, otherwise: int) -> int:
    return next((v for k, v in known.items() if re.fullmatch(pattern, k) and isinstance(v, int)), otherwise)
