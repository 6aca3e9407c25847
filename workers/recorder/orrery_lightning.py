"""A Lightning logger: `Trainer(logger=OrreryLogger(url, token, name))`.

Works with lightning and pytorch_lightning: it has the interface of their `Logger` without importing
it.
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


def _plain(value: Any) -> Any:
    """A value that JSON represents; others by their `repr`."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return repr(value)[:200]


class OrreryLogger:
    """Records metrics on the first process; takes the arguments of `orrery_recorder.init`."""

    def __init__(
        self, url: str | None = None, token: str | None = None, name: str = "lightning", **more: Any
    ) -> None:
        spec = {"tags": ["lightning"], **(more.pop("spec", None) or {})}
        self._arguments = {"url": url, "token": token, "name": name, "spec": spec, **more}
        self._run: orrery_recorder.Run | None = None
        self._saved = ""

    @property
    def experiment(self) -> orrery_recorder.Run:
        """The run, created at its first use; one that records nothing on ranks other than 0."""
        if self._run is None:
            rank = int(
                os.environ.get("RANK")
                or os.environ.get("LOCAL_RANK")
                or os.environ.get("SLURM_PROCID")
                or 0
            )
            self._run = orrery_recorder.init(**self._arguments, rank=rank)
        return self._run

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self._arguments["name"])

    @property
    def version(self) -> str:
        """The spool's name: unlike the run's id, it is known from the start, so that Lightning's
        checkpoint folders keep their name.
        """
        spool = self.experiment.spool
        return spool.name if spool else "0"

    @property
    def save_dir(self) -> None:
        """None: no local logs."""
        return None

    @property
    def root_dir(self) -> None:
        """None: no local logs."""
        return None

    @property
    def log_dir(self) -> None:
        """None: no local logs."""
        return None

    @property
    def group_separator(self) -> str:
        """Separator of metric groups."""
        return "/"

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the metrics of a step."""
        values = {
            _NAMES.get(name, name): value for name, value in metrics.items() if name != "epoch"
        }
        rates = [name for name in values if name.startswith("lr-")]  # of LearningRateMonitor
        if len(rates) == 1:
            values["lr"] = values.pop(rates[0])
        if values:
            self.experiment.log(values, step=step)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Record the hyperparameters as the run's configuration."""
        plain = vars(params) if isinstance(params, Namespace) else dict(params or {})
        self.experiment.config({str(name): _plain(value) for name, value in plain.items()})

    def log_graph(self, *_: Any, **__: Any) -> None:
        """Do nothing: Orrery shows no graphs."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Record the saved checkpoint once."""
        path = str(
            getattr(checkpoint_callback, "last_model_path", "")
            or checkpoint_callback.best_model_path
        )
        if path and path != self._saved:
            self._saved = path
            self.experiment.event("checkpoint_saved", {"path": path})

    def save(self) -> None:
        """Send what is pending."""
        self.experiment.flush(timeout_s=1.0)

    def finalize(self, status: str) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish(_STATUS.get(status, "finished"))
