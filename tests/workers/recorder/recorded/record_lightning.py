"""Records what Lightning's Trainer calls of its logger; the tests call the same again.

Lightning is not a dependency. In an environment that has the project's packages and lightning:

    python -m tests.workers.recorder.recorded.record_lightning

It writes lightning.jsonl next to this file: a line about the client, then a line per call.
"""

from __future__ import annotations

import json
import os
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.workers.recorder.server import TOKEN, Ingest, serving

FILE = Path(__file__).with_name("lightning.jsonl")
READ = ("name", "version", "save_dir", "root_dir", "log_dir", "group_separator")
CALLED = (
    "log_metrics",
    "log_hyperparams",
    "log_graph",
    "after_save_checkpoint",
    "save",
    "finalize",
)


def main() -> None:
    """Train a linear model for two epochs with a logger that records its use."""
    import lightning
    import torch

    from workers.recorder.orrery_lightning import OrreryLogger

    calls: list[dict[str, Any]] = []

    class Recording(OrreryLogger):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in READ:
                calls.append({"read": name})
            if name not in CALLED:
                return value

            def call(*given: Any, **named: Any) -> Any:
                calls.append(
                    {
                        "call": name,
                        "given": [_plain(each) for each in given],
                        "named": {key: _plain(each) for key, each in named.items()},
                    }
                )
                return value(*given, **named)

            return call

    class Model(lightning.LightningModule):
        def __init__(self, lr: float = 0.1, layers: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(batch).pow(2).mean()
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.net(batch).pow(2).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])

    data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
    with tempfile.TemporaryDirectory() as folder, serving(Ingest()) as server:
        os.environ.update(ORRERY_CAPTURE="0", ORRERY_SYSTEM_S="0", ORRERY_SPOOL=folder)
        trainer = lightning.Trainer(
            max_epochs=2,
            logger=Recording(server.url, TOKEN, "lightning"),
            log_every_n_steps=1,
            default_root_dir=folder,
            accelerator="cpu",
            enable_progress_bar=False,
            callbacks=[lightning.pytorch.callbacks.LearningRateMonitor()],
        )
        trainer.fit(Model(), data, data)
    about = {
        "client": "lightning",
        "version": metadata.version("lightning"),
        "recorded": datetime.now(UTC).date().isoformat(),
        "by": "python -m tests.workers.recorder.recorded.record_lightning",
    }
    FILE.write_text("".join(json.dumps(each) + "\n" for each in (about, *calls)))


def _plain(value: Any) -> Any:
    """A value as JSON; of a checkpoint callback what loggers read of it."""
    paths = {
        name: Path(path).name if path else ""
        for name in ("last_model_path", "best_model_path")
        if isinstance(path := getattr(value, name, None), str)
    }
    if paths:
        return {"attributes": paths}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, bool | int | float | str | None):
        return value
    return float(value) if hasattr(value, "item") else type(value).__name__


if __name__ == "__main__":
    main()
