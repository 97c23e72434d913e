"""The start folder of a phase that goes on with the weights of the one before, as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gossamer.job.run_files import folder_of
from gossamer.job.trained_run import read_trained, standing_in
from gossamer.model.adapter import merge
from gossamer.model.export import config_of, files_beside
from gossamer.model.side_folder import check_no_side
from gossamer.model.source._digest import digest
from gossamer.model.started_source import start_of
from gossamer.store.start_folder import MASKS, StartContent, StartFolder, start_state, write_start
from gossamer.view.run_directory import open_run

METHOD = "continue"


def write_continued(source: Path, out: Path) -> dict[str, Any]:
    """Write the weights of the newest good checkpoint of a run as the start folder `out`, an adapter merged into them.

    Raises BadInput, CheckpointMismatch.
    """
    found = read_trained(source)
    module = getattr(found.module, "_orig_mod", found.module)  # that torch.compile wrapped
    check_no_side(module, str(source))
    merge(module)
    directory, out = open_run(source), out.absolute()
    with standing_in(folder_of(directory)):
        origin = found.origin
        files = {} if origin is None else files_beside(origin, found.tokenizer)
        made = "" if origin is None else origin.fingerprint()
        start = start_of(found.config.model)
        start = None if start is None else replace(start, path=start.path.absolute())
    masks = _masks(start, module)
    said = {"run": directory.name, "step": found.step}
    content = StartContent(
        tensors={name: tensor.detach() for name, tensor in start_state(module)},
        method=METHOD,
        source=digest([made, found.config.train.seed, said]),
        said=said,
        config=config_of(module),
        attributes={} if start is None else start.attributes,
        config_keys={} if start is None else start.config_keys,
        masks=masks,
        files={name: file for name, file in files.items() if name not in ("config.json", "README.md", "start.json")},
    )
    return {"bytes": write_start(out, content), **said}


def _masks(start: StartFolder | None, module: nn.Module) -> dict[str, Tensor]:
    """Return the masks that the run began with, of parameters whose zeros are still there."""
    state = dict(start_state(module))
    if start is None:
        return {}
    known = {name: start.tensor(name, MASKS).bool() for name in start.kinds(MASKS) if name in state}
    return {name: mask for name, mask in known.items() if not bool(state[name][~mask.to(state[name].device)].any())}
