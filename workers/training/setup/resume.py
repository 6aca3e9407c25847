"""Chooses the checkpoint a run continues from, and checks that it belongs to the run.

Does not read tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.models.errors import WeightsError
from workers.models.weights.checkpoint_table import read_table
from workers.models.weights.manifest import (
    NAME,
    DamagedError,
    complete_checkpoints,
    find_damage,
    read_manifest,
)
from workers.runtime.exit_codes import UserError
from workers.training.adapter_files import BaseWeights
from workers.training.setup.spec_loading import TrainingRun


@dataclass(frozen=True, slots=True)
class Start:
    """Where training starts: after `step` finished steps, `tokens` and `samples` consumed."""

    step: int = 0
    tokens: int = 0
    samples: int = 0
    folder: Path | None = None
    loss_scale: dict[str, Any] | None = None
    rejected: tuple[str, ...] = ()
    data: str | None = None  # the fingerprint of its data, if the checkpoint has one


def choose_start(run: TrainingRun, *, checkpoints: Path, resume: Path | None) -> Start:
    """The checkpoint `resume`, else the newest complete one under `checkpoints`, else step 0.

    Raises UserError if `resume` is damaged, or if the chosen one has another model, seed, optimizer
    or sequence length.
    """
    rejected: list[str] = []
    for folder in [resume] if resume is not None else complete_checkpoints(checkpoints):
        try:
            manifest = read_manifest(folder)
            broken = find_damage(folder, manifest)
            if broken is None:
                read_table(folder)
        except WeightsError as error:
            if resume is not None or not isinstance(error, DamagedError):
                raise UserError(f"resume: {error}") from None
            rejected.append(str(error))
            continue
        if broken is None:
            _check_same(run, folder, manifest)
            done = manifest["step"], manifest["tokens"], manifest["samples"]
            return Start(
                *done,
                folder,
                manifest.get("loss_scale"),
                tuple(rejected),
                manifest.get("data_fingerprint"),
            )
        if resume is not None:
            raise UserError(f"resume: {folder}: {broken}. Use an older checkpoint.")
        rejected.append(f"{folder}: {broken}")
    return Start(rejected=tuple(rejected))


def check_same_data(start: Start, fingerprint: str, *, allow_change: bool) -> bool:
    """Whether the data are those of the checkpoint, or the checkpoint does not say.

    Raises UserError if they differ and `allow_change` is false.
    """
    if start.data is None or start.data == fingerprint:
        return True
    if not allow_change:
        raise UserError(
            f"resume: {start.folder} was trained on other data: the rows, their number or their "
            "order differ. Use the same data, train.init_from with this checkpoint for a new run, "
            "or train.allow_data_change true to continue on these data."
        )
    return False


def check_same_base(folder: Path, base: BaseWeights) -> None:
    """Raises UserError if an adapter's checkpoint was trained over other weights than `base`."""
    saved = read_manifest(folder).get("base") or {}
    if saved.get("fingerprint") != base.fingerprint:
        raise UserError(
            f"resume: {folder} is an adapter over {saved.get('path')}, train.init_from has other "
            f"weights ({base.path}). Use the adapter's own base."
        )


def manifest_of(
    run: TrainingRun,
    *,
    step: int,
    tokens: int,
    samples: int,
    world_size: int,
    loss_scale: dict[str, Any] | None = None,
    data_fingerprint: str | None = None,
) -> dict[str, Any]:
    """A checkpoint's manifest without its files.

    Random numbers need no state, since seeds follow from seed and sample index; nor does the
    learning rate, a function of the step.
    """
    return {
        "step": step,
        "tokens": tokens,
        "samples": samples,
        "rng": {
            "seed": run.train.seed,
            "rule": "weights by parameter name, order by epoch, dropout by sample index",
        },
        "world_size": world_size,
        "model": run.model.to_dict(),
        "seq_len": run.train.seq_len,
        "optimizer": run.train.optimizer.name,
        "spec": run.spec.to_dict(),
        **({"loss_scale": loss_scale} if loss_scale else {}),
        **({"data_fingerprint": data_fingerprint} if data_fingerprint else {}),
    }


def _check_same(run: TrainingRun, folder: Path, manifest: dict[str, Any]) -> None:
    ours = manifest_of(run, step=0, tokens=0, samples=0, world_size=1)
    if "weights_of" in manifest:
        message = f"has only weights, converted from {manifest['weights_of']}"
        raise UserError(f"resume: {folder} {message}. Use train.init_from with its path.")
    missing = [name for name in ours if name not in manifest and name != "spec"]
    if missing:
        raise UserError(
            f"resume: {folder / NAME} has no {missing[0]}. Use a folder checkpoints/step-N of "
            "this engine."
        )
    saved_train = manifest.get("spec", {}).get("train") or {}
    for name in ("adapter", "freeze"):
        theirs, here = saved_train.get(name), run.spec.to_dict()["train"].get(name)
        if (theirs or None) != (here or None):
            raise UserError(
                f"resume: {folder} was written with train.{name} {theirs}, the spec has {here}. "
                f"Use the same {name}, or another run directory."
            )
    for name in ("model", "seq_len", "optimizer", "rng"):
        if manifest[name] != ours[name]:
            saved, requested = manifest[name], ours[name]
            if isinstance(saved, dict) and isinstance(requested, dict):
                keys = [k for k in {**saved, **requested} if saved.get(k) != requested.get(k)]
                name = f"{name}.{keys[0]}"
                saved, requested = saved.get(keys[0]), requested.get(keys[0])
            raise UserError(
                f"resume: {folder} was written with {name} {saved}, the spec has {requested}. "
                f"Use the same {name}, or another run directory."
            )
