"""Logits at trained positions only: the same losses and gradients as logits of all positions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.training.row_ranks import as_json, train_rows
from tests.workers.training.test_sft import LENGTH, spec
from workers.contracts import RunSpec
from workers.contracts.catalog.model_flops import head_flops_per_token, training_flops_per_token
from workers.contracts.catalog.presets import preset
from workers.contracts.specs.train import TrainBody
from workers.models.decoder import Decoder
from workers.training.data.rows import Row
from workers.training.loop import step_context
from workers.training.objectives.token_losses import token_losses, token_losses_at
from workers.training.parallel.batch_sharding import IGNORED


def test_losses_and_gradients_equal_those_of_all_positions() -> None:
    torch.manual_seed(0)
    model = Decoder(preset("llama-tiny"))
    tokens = torch.randint(0, 256, (2, 7))
    targets = torch.randint(0, 256, (2, 7))
    weights = torch.tensor([[0.0, 0, 1, 0.5, 1, 0, 0], [0, 0, 0, 0, 0, 2, 1]])
    targets[0, 4] = IGNORED
    at = ((weights != 0) & (targets != IGNORED)).flatten().nonzero().squeeze(1)
    logits = model(tokens, None, None, False, at)
    assert logits.shape == (1, 4, 256)
    few = token_losses_at(logits, targets, at)
    every = token_losses(model(tokens), targets)
    torch.testing.assert_close(few * weights, every * weights, rtol=1e-5, atol=1e-6)
    parameters = list(model.parameters())
    first = torch.autograd.grad((few * weights).sum(), parameters)
    second = torch.autograd.grad((every * weights).sum(), parameters)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def test_a_step_computes_the_logits_of_its_trained_tokens_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []

    def counted(logits: torch.Tensor, *args: torch.Tensor, fused: bool) -> torch.Tensor:
        computed.append(logits.shape[1])
        return token_losses_at(logits, *args, fused=fused)

    monkeypatch.setattr(step_context, "token_losses_at", counted)
    weights = np.zeros(LENGTH, np.float32)
    weights[4:7] = 1.0
    ids = np.arange(1, LENGTH + 2, dtype=np.int64)
    rows = [as_json(Row(ids, weights, (0,)))] * 4
    run = spec({"micro_batch_size": 2}, batch=4, steps=1, eval=None, checkpoint=None)
    outcome = train_rows(run, str(tmp_path), rows)
    assert outcome["class"] == "ok", outcome
    assert computed == [6, 6]
    # MFU counts the head for these tokens alone, all else for every position
    shape = RunSpec.from_dict(run).shape
    train = TrainBody.from_dict(run["train"])
    assert shape is not None
    whole, head = training_flops_per_token(shape, train), head_flops_per_token(shape, train)
    assert head == 6 * shape.vocab * shape.hidden
    points = (tmp_path / "rank-0" / "points.jsonl").read_text().splitlines()
    values = json.loads(points[0])["values"]
    flops = values["tflops_per_device"] * 1e12 * values["step_time_s"]
    assert flops == pytest.approx(4 * LENGTH * whole - (4 * LENGTH - 12) * head, rel=1e-6)
    assert values["tokens_per_s"] * values["step_time_s"] == pytest.approx(4 * LENGTH)
