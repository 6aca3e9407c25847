"""Logits at trained positions only: the same losses and gradients as logits of all positions."""

from __future__ import annotations

import torch

from workers.contracts.catalog.presets import preset
from workers.models.decoder import Decoder
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
