"""`python -m workers.training.precompute_teacher`: writes a teacher's likeliest tokens to files.

Runs the teacher of a distillation spec once over its examples, in one process on one device. A run
with these files as its teacher needs no second model. Does not train.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.contracts.examples.shapes import needed_shape
from workers.models.adapters.peft_files import fingerprint
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.weights.open import open_source
from workers.models.weights.reader import fill_model
from workers.runtime.exit_codes import CODES, UserError
from workers.training.data.examples.opening import open_examples
from workers.training.data.examples.run_examples import open_run_chat_format
from workers.training.data.examples.store import Store
from workers.training.data.pretrained_tokenizer import (
    check_teacher_tokenizer,
    copy_tokenizer,
    resolve_data,
)
from workers.training.numerics.precision import DTYPES
from workers.training.objectives.distill.divergences import top_tokens
from workers.training.objectives.distill.teacher_files import write_manifest, write_tokens
from workers.training.setup.spec_loading import TrainingRun, load_run

DEFAULT_TOP_K = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns an exit code of `runtime.exit_codes`."""
    parser = argparse.ArgumentParser(
        prog="workers.training.precompute_teacher",
        description="Write a teacher's most probable tokens.",
    )
    parser.add_argument(
        "--spec",
        type=Path,
        required=True,
        help="a run of objective distill; its teacher is a model",
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--top-k", type=int, help=f"tokens per position (the spec's top_k, else {DEFAULT_TOP_K})"
    )
    parser.add_argument("--batch", type=int, default=8, help="examples per forward pass")
    options = parser.parse_args(argv)
    try:
        count = precompute(
            load_run(options.spec), options.out, top_k=options.top_k, batch=options.batch
        )
    except (UserError, WeightsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return CODES["user_error"]
    print(f"{options.out}: {count:,} tokens")
    return 0


def precompute(run: TrainingRun, out: Path, *, top_k: int | None = None, batch: int = 8) -> int:
    """Write the files of the run's data and validation data; returns the number of tokens.

    Raises UserError and WeightsError.
    """
    distill = run.train.distill
    if distill is None:
        raise UserError("train.objective: only a run of distill has a teacher. Use distill.")
    count = top_k or distill.top_k or DEFAULT_TOP_K
    weights = open_source(distill.teacher)
    if weights.spec.vocab != run.model.vocab:
        raise UserError(
            f"train.distill.teacher: its vocabulary has {weights.spec.vocab} tokens, the model's "
            f"{run.model.vocab}. Use a teacher with the same tokenizer."
        )
    out.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(run, checkpoints=out)
    check_teacher_tokenizer(distill.teacher, checkpoints=out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device):
        decoder = Decoder(weights.spec).to(DTYPES[run.plan.precision]).eval()
    fill_model(decoder, weights)
    sources, total = [], 0
    for label, store in _stores(run, out):
        longest = min(run.train.seq_len + 1, weights.spec.max_seq_len)
        chosen = _top(decoder, store, count, batch=batch, longest=longest, device=device)
        write_tokens(out, store, *chosen)
        total += int(store.trained.sum())
        sources.append({"name": label, "examples": len(store), "tokens": int(store.trained.sum())})
    write_manifest(
        out,
        {
            "teacher": weights.where,
            "fingerprint": fingerprint(weights),
            "vocab": weights.spec.vocab,
            "top_k": min(count, weights.spec.vocab),
            "seq_len": run.train.seq_len,
            "precision": run.plan.precision,
            "sources": sources,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )
    return total


def _stores(run: TrainingRun, out: Path) -> list[tuple[str, Store]]:
    distill, shape = run.train.distill, needed_shape(run.train)
    assert distill is not None and shape is not None
    chat = open_run_chat_format(run, checkpoints=out)
    data = [resolve_data(run, checkpoints=out)]
    if run.train.eval is not None and run.train.eval.data is not None:
        data.append(run.train.eval.data)
    how: dict[str, Any] = {"shape": shape, "train_on": distill.train_on, "vocab": run.model.vocab}
    opened = [
        pair for each in data for pair in open_examples(each, chat, **how, cache=out / "cache")
    ]
    return [(part.label, store) for part, store in opened]


@torch.no_grad()
def _top(
    decoder: Decoder, store: Store, count: int, *, batch: int, longest: int, device: torch.device
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Each trained token's `count` most probable ones, in the store's order; zeros for a token
    without one before it and for those beyond the sequence.
    """
    documents = list(zip(store.offsets[:-1].tolist(), store.offsets[1:].tolist(), strict=True))
    count = min(count, decoder.spec.vocab)
    tokens: list[Any] = [None] * len(documents)
    logprobs: list[Any] = [None] * len(documents)
    by_length = sorted(range(len(documents)), key=lambda n: documents[n][1] - documents[n][0])
    for first in range(0, len(by_length), batch):
        some = by_length[first : first + batch]
        spans = [(documents[n][0], min(documents[n][1], documents[n][0] + longest)) for n in some]
        length = max(2, *(stop - start for start, stop in spans))
        ids = np.zeros((len(some), length), dtype=np.int64)
        for row, (start, stop) in enumerate(spans):
            ids[row, : stop - start] = store.ids[start:stop]
        logits = decoder(torch.from_numpy(ids[:, :-1]).to(device))
        best = top_tokens(logits, count)
        for row, (number, (start, stop)) in enumerate(zip(some, spans, strict=True)):
            trained = np.flatnonzero(store.trained[start : documents[number][1]])
            known = trained[(trained > 0) & (trained < stop - start)]
            each_token = np.zeros((len(trained), count), dtype=np.uint32)
            each_logprob = np.zeros((len(trained), count), dtype=np.float32)
            places = np.isin(trained, known)
            each_token[places] = best.tokens[row, known - 1].cpu().numpy()
            each_logprob[places] = best.logprobs[row, known - 1].float().cpu().numpy()
            tokens[number], logprobs[number] = each_token, each_logprob
    return tokens, logprobs


if __name__ == "__main__":
    sys.exit(main())
