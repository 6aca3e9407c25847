"""A run's training and held-out samples, from its spec.

Knows which part of a run's data is for what; does not know how files are read.
"""

from __future__ import annotations

from pathlib import Path

from workers.training.accept import TrainingRun
from workers.training.data.samples import Samples
from workers.training.data.sources import Source, open_sources, open_tokenizer
from workers.training.data.tokenizer import NAME, check_same


def open_samples(run: TrainingRun, *, cache: Path, kept: Path) -> tuple[Samples, Samples | None]:
    """Samples to train on and, where the run validates, to validate on: `eval.data`, or the last tenth of each source.

    Tokenised text goes to the folder `cache`, a trained tokenizer to the folder `kept`. Held-out data that names no
    tokenizer is read by the run's. Raises UserError for data that cannot be used.
    """
    data, vocab, spec = run.spec.data, run.model.vocab, run.train.eval
    tokenizer = open_tokenizer(data, vocab=vocab, kept=kept)
    weights = run.train.init_from
    if data.tokenizer not in (None, "bytes") and weights is not None and weights.path is not None:
        check_same(Path(data.tokenizer) if isinstance(data.tokenizer, str) else kept / NAME, Path(weights.path))
    sources = open_sources(data, tokenizer=tokenizer, vocab=vocab, cache=cache)
    halves = [source.stream.split() for source in sources]
    learned = [Source(each.name, half[0], each.weight) for each, half in zip(sources, halves, strict=True)]
    length, seed = run.train.seq_len, run.train.seed
    train = Samples(learned, seq_len=length, vocab=vocab, seed=seed, shuffle=True)
    if spec is None:
        return train, None
    held = [Source(each.name, half[1], each.weight) for each, half in zip(sources, halves, strict=True)]
    if spec.data is not None:
        other = tokenizer if spec.data.tokenizer is None else open_tokenizer(spec.data, vocab=vocab, kept=kept)
        held = open_sources(spec.data, tokenizer=other, vocab=vocab, cache=cache)
    return train, Samples(held, seq_len=length, vocab=vocab, seed=seed, shuffle=False, name="held-out data")
