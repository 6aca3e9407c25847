"""A run's training and validation rows of examples, from its spec.

Writes the template and the stop tokens next to the checkpoints, so a served model formats and
stops as it was trained. Does not depend on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.contracts.examples.example import Shape
from workers.contracts.examples.shapes import needed_shape
from workers.contracts.specs.data import DataSpec, SourceSpec
from workers.contracts.specs.finetuning.objectives import (
    DistillBody,
    DpoBody,
    RewardBody,
    SftBody,
)
from workers.contracts.specs.train import TrainBody
from workers.models.errors import WeightsError
from workers.models.text.assets import read_assets, write_files
from workers.models.text.chat_format import ChatFormat, TrainOn, open_chat_format
from workers.runtime.exit_codes import UserError
from workers.training.data.examples.opening import open_examples
from workers.training.data.examples.samples import ExampleSamples, ExampleSource
from workers.training.data.examples.store import Store
from workers.training.setup.spec_loading import TrainingRun

_Opened = Sequence[tuple[SourceSpec, Store]]


def open_run_chat_format(run: TrainingRun, *, checkpoints: Path) -> ChatFormat:
    """The run's chat format: its template, or that of the tokenizer in `checkpoints`.

    Raises UserError.
    """
    options = _options(run.train)
    template = getattr(options, "template", None)
    try:
        return open_chat_format(checkpoints, template=template)
    except WeightsError as error:
        raise UserError(f"data.tokenizer: {error}") from None


def open_example_samples(
    run: TrainingRun, data: DataSpec, *, shape: Shape, cache: Path, checkpoints: Path
) -> tuple[ExampleSamples, ExampleSamples | None]:
    """Training rows and, if the run validates, validation rows.

    The latter come from `eval.data`, or from the last tenth of each source. Raises UserError for
    data that cannot be trained on.
    """
    chat = open_run_chat_format(run, checkpoints=checkpoints)
    new = chat.assets(read_assets(checkpoints))
    if new:
        write_files(new, checkpoints)
    options = _options(run.train)
    train_on: TrainOn = getattr(options, "train_on", "completion")
    how: dict[str, Any] = {"shape": shape, "vocab": run.model.vocab, "cache": cache}
    opened = open_examples(data, chat, train_on=train_on, **how)
    if run.train.reward is not None and run.train.reward.margin:
        _require_margins(opened)
    spec = run.train.eval
    held_out = None
    if spec is not None:
        held_out = (
            _whole(open_examples(spec.data, chat, train_on=train_on, **how))
            if spec.data is not None
            else [_part(part, store, training=False) for part, store in opened]
        )
    split = spec is not None and spec.data is None
    train = (
        [_part(part, store, training=True) for part, store in opened] if split else _whole(opened)
    )
    rows: dict[str, Any] = {
        "shape": shape,
        "seq_len": run.train.seq_len,
        "seed": run.train.seed,
        "packing": bool(getattr(options, "packing", False)),
    }
    samples = ExampleSamples(train, shuffle=True, **rows)
    if held_out is None:
        return samples, None
    return samples, ExampleSamples(held_out, shuffle=False, name="held-out data", **rows)


def example_prompts(
    run: TrainingRun, data: DataSpec, prompts: Sequence[str], *, cache: Path, checkpoints: Path
) -> tuple[list[list[int]], ChatFormat]:
    """Ids of text samples' prompts: of user messages, or of held-out examples without `prompts`.

    The latter are those of all sources in turn, shorter than a sequence.
    """
    chat = open_run_chat_format(run, checkpoints=checkpoints)
    if prompts:
        return [chat.prompt([{"role": "user", "content": text}]) for text in prompts], chat
    shape = needed_shape(run.train)
    assert shape is not None
    options, spec = _options(run.train), run.train.eval
    train_on: TrainOn = getattr(options, "train_on", "completion")
    held_out = spec.data if spec is not None else None
    opened = open_examples(
        held_out or data, chat, shape=shape, train_on=train_on, vocab=run.model.vocab, cache=cache
    )
    parts = (
        _whole(opened)
        if held_out is not None
        else [_part(part, store, training=False) for part, store in opened]
    )
    ids = []
    for turn in range(max(part.stop - part.first for part in parts)):
        for part in parts:
            if part.first + turn < part.stop:
                ids.append(_prompt_ids(part.store, part.first + turn))
    return [each for each in ids if 0 < len(each) < run.train.seq_len], chat


def _prompt_ids(store: Store, example: int) -> list[int]:
    start, _ = store.documents(example)[0]
    answer = int(store.answers[store.firsts[example]])
    return [int(number) for number in store.ids[start : start + answer]]


def _options(train: TrainBody) -> SftBody | DpoBody | RewardBody | DistillBody | None:
    for options in (train.sft, train.dpo, train.reward, train.distill):
        if options is not None:
            return options
    return None


def _require_margins(opened: _Opened) -> None:
    """Raises UserError if no pair has a margin to subtract."""
    if not any(bool((store.margins != 0).any()) for _, store in opened):
        raise UserError(
            "train.reward.margin: no line has a margin other than 0. Use margin false, or lines "
            'with "margin": 1.5.'
        )


def _whole(opened: _Opened) -> list[ExampleSource]:
    return [ExampleSource(part.label, store, 0, len(store), part.weight) for part, store in opened]


def _part(part: SourceSpec, store: Store, *, training: bool) -> ExampleSource:
    """The examples but the last tenth, or those; one at least is held out of two or more."""
    middle = len(store) - max(len(store) // 10, min(1, len(store) - 1))
    first, stop = (0, middle) if training else (middle, len(store))
    return ExampleSource(part.label, store, first, stop, part.weight)
