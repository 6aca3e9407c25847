"""A run's training and validation samples, from its spec.

Does not depend on how files are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from workers.contracts.examples.shapes import needed_shape
from workers.contracts.specs.data import DataSpec
from workers.contracts.specs.model import ModelSpec
from workers.runtime.exit_codes import UserError
from workers.training.data.examples.run_examples import open_example_samples
from workers.training.data.pretrained_tokenizer import check_inherited, copy_tokenizer, resolve_data
from workers.training.data.samples import Samples
from workers.training.data.sources import Source, open_sources, open_tokenizer
from workers.training.setup.spec_loading import TrainingRun


def open_samples(
    run: TrainingRun, *, cache: Path, checkpoints: Path
) -> tuple[Samples, Samples | None]:
    """Training samples and, if the run validates, validation samples.

    The latter come from `eval.data`, or from the last tenth of each source. Tokenized text goes to
    the folder `cache`, the run's tokenizer to `checkpoints`. Validation data without a tokenizer
    uses the run's. Raises UserError for data that cannot be used.
    """
    copy_tokenizer(run, checkpoints=checkpoints)
    data, vocab, spec = resolve_data(run, checkpoints=checkpoints), run.model.vocab, run.train.eval
    tokenizer = open_tokenizer(data, vocab=vocab, checkpoints=checkpoints)
    check_inherited(run, checkpoints=checkpoints)
    shape = needed_shape(run.train)
    if shape is not None:
        train_rows, held_out_rows = open_example_samples(
            run, data, shape=shape, cache=cache, checkpoints=checkpoints
        )
        if train_rows.masked:
            _refuse_dynamic(run.model, run.train.seq_len)
        return cast("tuple[Samples, Samples | None]", (train_rows, held_out_rows))
    sources = open_sources(data, tokenizer=tokenizer, vocab=vocab, cache=cache)
    halves = [source.stream.split() for source in sources]
    train_sources = [
        Source(each.name, half[0], each.weight) for each, half in zip(sources, halves, strict=True)
    ]
    length, seed = run.train.seq_len, run.train.seed
    train = Samples(
        train_sources,
        seq_len=length,
        vocab=vocab,
        seed=seed,
        shuffle=True,
        masked=_masked(data, sources),
    )
    if train.masked:
        _refuse_dynamic(run.model, length)
    if spec is None:
        return train, None
    masked = train.masked
    eval_sources = [
        Source(each.name, half[1], each.weight) for each, half in zip(sources, halves, strict=True)
    ]
    if spec.data is not None:
        eval_tokenizer = (
            tokenizer
            if spec.data.tokenizer is None
            else open_tokenizer(spec.data, vocab=vocab, checkpoints=checkpoints)
        )
        eval_sources = open_sources(spec.data, tokenizer=eval_tokenizer, vocab=vocab, cache=cache)
        document_masks = (
            spec.data.document_masks
            if spec.data.document_masks is not None
            else data.document_masks
        )
        masked = _masked(
            spec.data.model_copy(update={"document_masks": document_masks}),
            eval_sources,
            field="train.eval.data",
        )
    name = "held-out data"
    return train, Samples(
        eval_sources,
        seq_len=length,
        vocab=vocab,
        seed=seed,
        shuffle=False,
        name=name,
        masked=masked,
    )


def _refuse_dynamic(model: ModelSpec, length: int) -> None:
    """Raises UserError if rotations depend on a sequence's length, which differs per packed
    document.
    """
    scaling = model.rope.scaling if model.position == "rope" else None
    if scaling is None or scaling.name != "dynamic":
        return
    original = scaling.original_max_seq_len or model.max_seq_len
    if length > original:
        message = (
            f"dynamic scaling depends on the sequence length beyond {original} tokens, which "
            "differs per packed document"
        )
        raise UserError(
            f"model.rope.scaling: {message}. Use name yarn or linear, seq_len {original} or "
            "document_masks false."
        )


def _masked(data: DataSpec, sources: list[Source], *, field: str = "data") -> bool:
    """Whether attention is limited to documents.

    Raises UserError if that is requested and document boundaries are unknown.
    """
    known = [source.stream.knows_documents for source in sources]
    if data.document_masks and not any(known):
        message = (
            f"document boundaries are unknown in {', '.join(source.name for source in sources)}"
        )
        hint = "Set document_end to the token after each document, or use false."
        raise UserError(f"{field}.document_masks: {message}. {hint}")
    if data.document_masks is not None:
        return data.document_masks
    parts = [part for _, part in data.parts()]
    return any(
        knows and part.path is not None and part.format != "text"
        for knows, part in zip(known, parts, strict=True)
    )
