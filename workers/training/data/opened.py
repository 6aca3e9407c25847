"""A run's training and held-out samples, from its spec.

Knows which part of a run's data is for what; does not know how files are read.
"""

from __future__ import annotations

from pathlib import Path

from workers.contracts.specs.data import DataSpec
from workers.contracts.specs.model import ModelSpec
from workers.runtime.exits import UserError
from workers.training.data.inherited import check_inherited, data_of, inherit
from workers.training.data.samples import Samples
from workers.training.data.sources import Source, open_sources, open_tokenizer
from workers.training.setup.spec_loading import TrainingRun


def open_samples(run: TrainingRun, *, cache: Path, kept: Path) -> tuple[Samples, Samples | None]:
    """Samples to train on and, where the run validates, to validate on: `eval.data`, or the last
    tenth of each source.

    Tokenised text goes to the folder `cache`, the run's tokenizer to the folder `kept`. Held-out
    data that names no
    tokenizer is read by the run's. Raises UserError for data that cannot be used.
    """
    inherit(run, kept=kept)
    data, vocab, spec = data_of(run, kept=kept), run.model.vocab, run.train.eval
    tokenizer = open_tokenizer(data, vocab=vocab, kept=kept)
    check_inherited(run, kept=kept)
    sources = open_sources(data, tokenizer=tokenizer, vocab=vocab, cache=cache)
    halves = [source.stream.split() for source in sources]
    learned = [
        Source(each.name, half[0], each.weight) for each, half in zip(sources, halves, strict=True)
    ]
    length, seed = run.train.seq_len, run.train.seed
    train = Samples(
        learned, seq_len=length, vocab=vocab, seed=seed, shuffle=True, masked=_masked(data, sources)
    )
    if train.masked:
        _refuse_dynamic(run.model, length)
    if spec is None:
        return train, None
    masked = train.masked
    held = [
        Source(each.name, half[1], each.weight) for each, half in zip(sources, halves, strict=True)
    ]
    if spec.data is not None:
        other = (
            tokenizer
            if spec.data.tokenizer is None
            else open_tokenizer(spec.data, vocab=vocab, kept=kept)
        )
        held = open_sources(spec.data, tokenizer=other, vocab=vocab, cache=cache)
        said = (
            spec.data.document_masks
            if spec.data.document_masks is not None
            else data.document_masks
        )
        masked = _masked(
            spec.data.model_copy(update={"document_masks": said}), held, field="train.eval.data"
        )
    name = "held-out data"
    return train, Samples(
        held, seq_len=length, vocab=vocab, seed=seed, shuffle=False, name=name, masked=masked
    )


def _refuse_dynamic(model: ModelSpec, length: int) -> None:
    """Raises UserError where rotations depend on how long a sequence is, which packed documents do
    not share.
    """
    scaling = model.rope.scaling if model.position == "rope" else None
    if scaling is None or scaling.name != "dynamic":
        return
    original = scaling.original_max_seq_len or model.max_seq_len
    if length > original:
        message = (
            f"dynamic scaling turns by a sequence's length beyond {original} tokens, packed "
            "documents have their own"
        )
        raise UserError(
            f"model.rope.scaling: {message}; try name yarn or linear, seq_len {original} or "
            "document_masks false"
        )


def _masked(data: DataSpec, sources: list[Source], *, field: str = "data") -> bool:
    """Whether attention keeps to documents.

    Raises UserError where it is to and nothing tells where they begin.
    """
    known = [source.stream.knows_documents for source in sources]
    if data.document_masks and not any(known):
        message = (
            f"nothing tells where documents begin in {', '.join(source.name for source in sources)}"
        )
        tries = "document_end, the token after each document, or false"
        raise UserError(f"{field}.document_masks: {message}; try {tries}")
    if data.document_masks is not None:
        return data.document_masks
    parts = [part for _, part in data.parts()]
    return any(
        knows and part.path is not None and part.format != "text"
        for knows, part in zip(known, parts, strict=True)
    )
