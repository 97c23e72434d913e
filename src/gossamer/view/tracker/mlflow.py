"""MLflow: the server MLFLOW_TRACKING_URI names, else files in the run directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.spec.records import Record
from gossamer.view.tracker import Session, Tracker
from gossamer.view.tracker._parts import flat, hush, need, scalars


@dataclass(frozen=True)
class Mlflow(Tracker):
    """The MLflow tracker. `uri`: tracking server; empty: MLFLOW_TRACKING_URI, else the folder mlflow/ of the run."""

    experiment: str = "gossamer"
    uri: str = ""

    def start(self, run_name: str, config: Mapping[str, Any], directory: Path) -> Session:
        hush(("MLFLOW_DISABLE_TELEMETRY", "true"), ("MLFLOW_ALLOW_FILE_STORE", "true"))
        mlflow = need("mlflow", extra="mlflow")
        folder = (directory / "mlflow").resolve().as_uri()
        client = mlflow.MlflowClient(tracking_uri=self.uri or os.environ.get("MLFLOW_TRACKING_URI") or folder)
        known = client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known is not None else client.create_experiment(self.experiment)
        run = client.create_run(experiment, run_name=run_name).info.run_id
        for key, value in flat(config).items():
            client.log_param(run, key, value[:500])
        return _Session(client, run)


@dataclass(frozen=True)
class _Session(Session):
    client: Any
    run: str

    def log(self, record: Record) -> None:
        step, values = scalars(record)
        for name, value in values.items():
            self.client.log_metric(self.run, name, value, timestamp=int(record.time_s * 1000), step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run)
