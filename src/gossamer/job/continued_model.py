"""The start folder of a phase that goes on with the weights of the one before, as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.job.run_files import folder_of
from gossamer.job.trained_run import read_trained, standing_in
from gossamer.model.adapter import merge
from gossamer.model.export import config_of, files_beside
from gossamer.store.file_digest import digest
from gossamer.store.start_folder import StartContent, StartFolder, start_state, write_start
from gossamer.view.run_directory import open_run

METHOD = "continue"


def write_continued(source: Path, out: Path) -> dict[str, Any]:
    """Write the weights of the newest good checkpoint of a run as the start folder `out`, an adapter merged into them.

    What the run's own start folder says of its model goes on: the epsilon of norms, and the masks whose zeros the run
    kept; masks whose zeros it trained are named in what is returned. Raises BadInput, CheckpointMismatch.
    """
    found = read_trained(source)
    merge(found.module)
    module = getattr(found.module, "_orig_mod", found.module)  # that torch.compile wrapped
    tensors = {name: tensor.detach() for name, tensor in start_state(module)}
    directory, out = open_run(source), out.absolute()
    with standing_in(folder_of(directory)):
        origin = found.origin
        files = {} if origin is None else files_beside(origin, found.tokenizer)
        made = "" if origin is None else origin.fingerprint()
    masks, filled = ({}, 0) if found.start is None else _held_masks(found.start, tensors)
    said = {"run": directory.name, "step": found.step} | ({"masks_trained_over": filled} if filled else {})
    content = StartContent(
        tensors=tensors,
        method=METHOD,
        source=digest([made, found.config.train.seed, said]),
        said=said,
        config=config_of(module),
        attributes=found.start.attributes if found.start is not None else {},
        config_keys=found.start.config_keys if found.start is not None else {},
        files={name: file for name, file in files.items() if name not in ("config.json", "README.md", "start.json")},
        masks=masks,
    )
    return {"bytes": write_start(out, content), **said}


def _held_masks(start: StartFolder, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return the masks of a start folder whose zeros the weights still have, and the number of the others."""
    masks = dict(start.masks())
    held = {name: mask for name, mask in masks.items() if not bool(tensors[name][~mask].any())}
    return held, len(masks) - len(held)
