"""The start folder of a phase that goes on with the weights of the one before, as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gossamer.job.run_files import folder_of
from gossamer.job.trained_run import read_trained, standing_in
from gossamer.model.adapter import merge
from gossamer.model.export import config_of, files_beside
from gossamer.model.source._digest import digest
from gossamer.store.start_folder import StartContent, start_state, write_start
from gossamer.view.run_directory import open_run

METHOD = "continue"


def write_continued(source: Path, out: Path) -> dict[str, Any]:
    """Write the weights of the newest good checkpoint of a run as the start folder `out`, an adapter merged into them.

    Raises BadInput, CheckpointMismatch.
    """
    found = read_trained(source)
    merge(found.module)
    module = getattr(found.module, "_orig_mod", found.module)  # that torch.compile wrapped
    directory, out = open_run(source), out.absolute()
    with standing_in(folder_of(directory)):
        origin = found.origin
        files = {} if origin is None else files_beside(origin, found.tokenizer)
        made = "" if origin is None else origin.fingerprint()
    said = {"run": directory.name, "step": found.step}
    content = StartContent(
        tensors={name: tensor.detach() for name, tensor in start_state(module)},
        method=METHOD,
        source=digest([made, found.config.train.seed, said]),
        said=said,
        config=config_of(module),
        files={name: file for name, file in files.items() if name not in ("config.json", "README.md", "start.json")},
    )
    return {"bytes": write_start(out, content), **said}
