"""The tokenizer of training that starts from existing weights: theirs, or one with the same ids.

A student that starts from random weights reads text with its teacher's tokenizer.

Does not depend on how text is read.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from workers.contracts.specs.data import BpeSpec, DataSpec
from workers.contracts.specs.finetuning.objectives import TEACHER_MANIFEST
from workers.contracts.specs.model import ModelSource
from workers.models.errors import WeightsError
from workers.models.text.assets import NAMES, read_assets, reads_bytes, write_files
from workers.models.weights.locations import locate_weights
from workers.models.weights.manifest import complete_checkpoints
from workers.runtime.exit_codes import UserError
from workers.training.data.tokenizer import NAME, check_same
from workers.training.setup.spec_loading import TrainingRun


def copy_tokenizer(run: TrainingRun, *, checkpoints: Path) -> None:
    """Copy the run's tokenizer, and the other text assets of `train.init_from`, to `checkpoints`.

    Raises UserError if text has no tokenizer, or if `data.tokenizer` is bytes and the weights were
    trained on tokens. Missing weights are accepted when a checkpoint exists: the run resumes from
    that.
    """
    source, tokenizer = run.train.init_from, run.spec.data.tokenizer
    files = (
        _read_named_tokenizer(Path(tokenizer))
        if isinstance(tokenizer, str) and tokenizer != "bytes"
        else {}
    )
    if tokenizer is None and (teacher := _tokenizer_teacher(run)) is not None:
        with suppress(WeightsError):  # loading the teacher reports it
            files |= read_assets(locate_weights(teacher))
    if source is not None:
        try:
            where = locate_weights(source)
            weights_assets = read_assets(where)
        except WeightsError as error:
            if _uses_weights_tokenizer(run) and not complete_checkpoints(checkpoints):
                raise UserError(f"train.init_from: {error}") from None
        else:
            if weights_assets or not complete_checkpoints(
                checkpoints
            ):  # a resumed run was checked at its start
                _refuse_byte_text(run, where, known=NAME in weights_assets)
            files |= {} if isinstance(tokenizer, BpeSpec) else weights_assets
    new = {name: data for name, data in files.items() if not _file_equals(checkpoints / name, data)}
    if new:
        write_files(new, checkpoints)


def resolve_data(run: TrainingRun, *, checkpoints: Path) -> DataSpec:
    """The run's data with its tokenizer: the copy in `checkpoints`, unless the spec names one."""
    data = run.spec.data
    if (
        data.tokenizer is not None
        or (run.train.init_from is None and _tokenizer_teacher(run) is None)
        or not (checkpoints / NAME).is_file()
    ):
        return data
    return data.model_copy(update={"tokenizer": str(checkpoints / NAME)})


def describe_tokenizer(run: TrainingRun, *, checkpoints: Path) -> str | None:
    """What reads the run's text: a path, `bytes`, or None if the run reads no text."""
    data = resolve_data(run, checkpoints=checkpoints)
    if isinstance(data.tokenizer, BpeSpec):
        return str(checkpoints / NAME)
    return data.tokenizer or ("bytes" if any(part.is_text for _, part in data.parts()) else None)


def check_inherited(run: TrainingRun, *, checkpoints: Path) -> None:
    """Raises UserError if the spec's tokenizer gives text other ids than the weights' tokenizer."""
    tokenizer, source = run.spec.data.tokenizer, run.train.init_from
    if source is None or tokenizer in (None, "bytes"):
        return
    try:
        where = locate_weights(source)
    except WeightsError:
        return  # `copy_tokenizer` has reported it, or the run resumes from a checkpoint
    check_same(Path(tokenizer) if isinstance(tokenizer, str) else checkpoints / NAME, where)


def check_teacher_tokenizer(source: ModelSource, *, checkpoints: Path) -> None:
    """Raises UserError if a teacher's tokenizer gives text other ids than the run's."""
    if not (checkpoints / NAME).is_file():
        return
    try:
        check_same(checkpoints, locate_weights(source))
    except WeightsError as error:
        raise UserError(f"train.distill.teacher: {error}") from None
    except UserError as error:
        message = str(error).removeprefix("data.tokenizer: ").split(". ")[0]
        raise UserError(
            f"train.distill.teacher: {message}. Use a teacher with the run's tokenizer."
        ) from None


def _tokenizer_teacher(run: TrainingRun) -> ModelSource | None:
    """The teacher of a student without initial weights; None for a folder of teacher files."""
    distill = run.train.distill
    if distill is None or run.train.init_from is not None:
        return None
    path = distill.teacher.path
    return (
        None if path is not None and (Path(path) / TEACHER_MANIFEST).is_file() else distill.teacher
    )


def _uses_weights_tokenizer(run: TrainingRun) -> bool:
    """Whether this run's text is read by the weights' tokenizer."""
    return run.spec.data.tokenizer is None and any(
        part.is_text for _, part in run.spec.data.parts()
    )


def _refuse_byte_text(run: TrainingRun, where: Path, *, known: bool) -> None:
    tokenizer = run.spec.data.tokenizer
    if known and tokenizer == "bytes":
        message = f"bytes were requested, but {where} has a {NAME}"
        raise UserError(
            f"data.tokenizer: {message}. Omit data.tokenizer to use the tokenizer of the weights."
        )
    if known or not _uses_weights_tokenizer(run) or not where.exists():
        return
    try:
        known = reads_bytes(where)
    except WeightsError as error:
        raise UserError(f"train.init_from: {error}") from None
    if not known:
        message = (
            f"{where} has no {NAME}; text would be read as bytes, which the weights may not be "
            "trained on"
        )
        raise UserError(
            f"data.tokenizer: {message}. Use the path of its {NAME}, or bytes if they were trained "
            "on bytes."
        )


def _read_named_tokenizer(path: Path) -> dict[str, bytes]:
    """The files of a tokenizer that the spec names, a folder's with its chat template; empty if
    missing or invalid: loading reports that.
    """
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in NAMES if (path / name).is_file()}
    return {NAME: path.read_bytes()} if path.is_file() and path.suffix == ".json" else {}


def _file_equals(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data
