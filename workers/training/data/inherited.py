"""The tokenizer of training that begins from existing weights: the one they came with, or one that
gives the same ids.

Knows which tokenizer belongs to weights; does not know how text is read.
"""

from __future__ import annotations

from pathlib import Path

from workers.contracts.specs.data import BpeSpec, DataSpec
from workers.models.errors import WeightsError
from workers.models.text.assets import read_assets, write_files, reads_bytes
from workers.models.weights.locations import locate_weights
from workers.models.weights.manifest import complete_checkpoints
from workers.runtime.exits import UserError
from workers.training.data.tokenizer import NAME, check_same
from workers.training.setup.spec_loading import TrainingRun


def inherit(run: TrainingRun, *, kept: Path) -> None:
    """Put the run's tokenizer, and what else belongs to the weights of `train.init_from`, into
    `kept`, by checkpoints.

    Raises UserError where text has no tokenizer, or `data.tokenizer` is bytes and the weights know
    tokens. Weights that
    are gone are no matter here: a run that goes on from its checkpoint needs them no more.
    """
    source, told = run.train.init_from, run.spec.data.tokenizer
    files = _named(Path(told)) if isinstance(told, str) and told != "bytes" else {}
    if source is not None:
        try:
            where = locate_weights(source)
            theirs = read_assets(where)
        except WeightsError as error:
            if _asks(run) and not complete_checkpoints(kept):
                raise UserError(f"train.init_from: {error}") from None
        else:
            if theirs or not complete_checkpoints(kept):  # a run that has begun was asked then
                _refuse_bytes(run, where, known=NAME in theirs)
            files |= {} if isinstance(told, BpeSpec) else theirs
    new = {name: data for name, data in files.items() if not _holds(kept / name, data)}
    if new:
        write_files(new, kept)


def data_of(run: TrainingRun, *, kept: Path) -> DataSpec:
    """The run's data with the tokenizer that reads it: what `inherit` put into `kept`, unless the
    spec names one.
    """
    data = run.spec.data
    if data.tokenizer is not None or run.train.init_from is None or not (kept / NAME).is_file():
        return data
    return data.model_copy(update={"tokenizer": str(kept / NAME)})


def reader_of(run: TrainingRun, *, kept: Path) -> str | None:
    """What reads the run's text, in a word for people: a path, bytes, or None where there is no
    text.
    """
    data = data_of(run, kept=kept)
    if isinstance(data.tokenizer, BpeSpec):
        return str(kept / NAME)
    return data.tokenizer or ("bytes" if any(part.is_text for _, part in data.parts()) else None)


def check_inherited(run: TrainingRun, *, kept: Path) -> None:
    """Raises UserError where a tokenizer that the spec names gives text other ids than the weights'
    own.
    """
    told, source = run.spec.data.tokenizer, run.train.init_from
    if source is None or told in (None, "bytes"):
        return
    try:
        where = locate_weights(source)
    except WeightsError:
        return  # `inherit` has told, or the run is past its beginning
    check_same(Path(told) if isinstance(told, str) else kept / NAME, where)


def _asks(run: TrainingRun) -> bool:
    """Whether the weights' own tokenizer is what reads this run's text."""
    return run.spec.data.tokenizer is None and any(
        part.is_text for _, part in run.spec.data.parts()
    )


def _refuse_bytes(run: TrainingRun, where: Path, *, known: bool) -> None:
    told = run.spec.data.tokenizer
    if known and told == "bytes":
        message = f"bytes are asked for, {where} knows tokens by a {NAME}"
        raise UserError(f"data.tokenizer: {message}; try none: then the weights' own is taken")
    if known or not _asks(run) or not where.exists():
        return
    try:
        known = reads_bytes(where)
    except WeightsError as error:
        raise UserError(f"train.init_from: {error}") from None
    if not known:
        message = (
            f"{where} has no {NAME}, and text would be read as bytes, which its weights may "
            "never have seen"
        )
        raise UserError(
            f"data.tokenizer: {message}; try the path of its {NAME}, or bytes where bytes are what "
            "they know"
        )


def _named(path: Path) -> dict[str, bytes]:
    """A tokenizer that the spec names; where it is missing or something else, who loads it tells."""
    file = path / NAME if path.is_dir() else path
    return {NAME: file.read_bytes()} if file.is_file() and file.suffix == ".json" else {}


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data
