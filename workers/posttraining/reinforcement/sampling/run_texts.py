"""What every rank of a policy optimization run reads: the chat format and the prompts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from workers.models.text.assets import read_assets, write_files
from workers.models.text.chat_format import ChatFormat
from workers.posttraining.reinforcement.sampling.prompts import Prompts, read_prompts
from workers.training.data.examples.run_examples import open_run_chat_format
from workers.training.data.pretrained_tokenizer import resolve_data
from workers.training.setup.spec_loading import TrainingRun


def write_assets(run: TrainingRun, chat: ChatFormat, checkpoints: Path) -> None:
    """Store the tokenizer's files next to the checkpoints, once per node."""
    new = chat.assets(read_assets(checkpoints))
    if new:
        checkpoints.mkdir(parents=True, exist_ok=True)
        write_files(new, checkpoints)


def read_run_prompts(run: TrainingRun, chat: ChatFormat, checkpoints: Path) -> Prompts:
    """The prompts of the run's data. Raises UserError."""
    options = run.train.policy
    assert options is not None
    return read_prompts(
        resolve_data(run, checkpoints=checkpoints),
        chat,
        longest=run.train.seq_len + 1 - options.rollout.max_new_tokens,
        needs_answer=options.needs_answer,
        vocab=run.model.vocab,
        seed=run.train.seed,
    )


def open_chat(run: TrainingRun, checkpoints: Path) -> ChatFormat:
    """The run's chat format."""
    return open_run_chat_format(run, checkpoints=checkpoints)


def hash_prompts(run: TrainingRun, prompts: Prompts, *more: Any) -> str:
    """A hash of all prompts and expected answers, and of `more`."""
    train = run.train
    texts = [(each.ids, each.expected) for each in prompts.prompts]
    parts = (*more, train.seed, train.seq_len, texts)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def rollout_digest(run: TrainingRun, prompts: Prompts) -> str:
    """A hash of what stored answers and their rewards depend on, but for the weights."""
    assert run.train.policy is not None
    return hash_prompts(run, prompts, run.train.policy.to_dict())
