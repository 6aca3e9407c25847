"""A Lightning logger: `Trainer(logger=OrreryLogger(url, token, name))`, for lightning and
pytorch_lightning alike.

Has what Lightning's `Logger` has without importing it, so it also serves anything else that logs
that way.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

try:
    from workers.recorder import orrery_recorder
except ImportError:  # installed alone
    import orrery_recorder  # type: ignore[no-redef]

_NAMES = {
    "train_loss": "loss",
    "train/loss": "loss",
    "loss_step": "loss",
    "train_loss_step": "loss",
    "val/loss": "val_loss",
    "valid_loss": "val_loss",
    "validation_loss": "val_loss",
    "learning_rate": "lr",
}
_STATUS = {"success": "finished", "finished": "finished", "failed": "failed", "aborted": "failed"}


class OrreryLogger:
    """Records metrics of Lightning's first process; arguments are those of `orrery_recorder.init`."""

    def __init__(
        self, url: str | None = None, token: str | None = None, name: str = "lightning", **more: Any
    ) -> None:
        spec = {"tags": ["lightning"], **(more.pop("spec", None) or {})}
        self._given = {"url": url, "token": token, "name": name, "spec": spec, **more}
        self._run: orrery_recorder.Run | None = None
        self._saved = ""

    @property
    def experiment(self) -> orrery_recorder.Run:
        """The run, begun at its first use. A silent one on ranks other than 0."""
        if self._run is None:
            rank = int(
                os.environ.get("RANK")
                or os.environ.get("LOCAL_RANK")
                or os.environ.get("SLURM_PROCID")
                or 0
            )
            self._run = orrery_recorder.init(**self._given, rank=rank)
        return self._run

    @property
    def name(self) -> str:
        return str(self._given["name"])

    @property
    def version(self) -> str:
        """Unlike the run's id known from the start, so that Lightning's checkpoint folders keep one
        name.
        """
        spool = self.experiment.spool
        return spool.name if spool else "0"

    @property
    def save_dir(self) -> None:
        return None

    @property
    def root_dir(self) -> None:
        return None

    @property
    def log_dir(self) -> None:
        return None

    @property
    def group_separator(self) -> str:
        return "/"

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        values = {
            _NAMES.get(name, name): value for name, value in metrics.items() if name != "epoch"
        }
        if values:
            self.experiment.log(values, step=step)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        plain = vars(params) if isinstance(params, Namespace) else dict(params or {})
        self.experiment.event(
            "hyperparameters", {str(name): repr(value)[:200] for name, value in plain.items()}
        )

    def log_graph(self, *_: Any, **__: Any) -> None:
        """A graph has no page in Orrery."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = str(
            getattr(checkpoint_callback, "last_model_path", "")
            or checkpoint_callback.best_model_path
        )
        if path and path != self._saved:
            self._saved = path
            self.experiment.event("checkpoint_saved", {"path": path})

    def save(self) -> None:
        self.experiment.flush(timeout_s=1.0)

    def finalize(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(_STATUS.get(status, "finished"))
