"""A non-finite number is traced to the first module that computed it, under every sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.workers.training.conftest import TINY, make_spec
from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.training.numerics.nan_locator import NonFiniteSource, find_non_finite
from workers.training.parallel.mesh import World

TOKENS = torch.arange(32).view(2, 16)


def set_parameter_value(module: Any, value: float) -> None:
    with torch.no_grad():
        next(module.parameters()).view(-1)[7] = value


def overflow_attention_scores(decoder: Decoder) -> None:
    """Make queries and keys finite, but their products infinite."""
    with torch.no_grad():
        for name in ("q", "k"):
            decoder.get_submodule(f"blocks.1.attn.{name}").weight.mul_(1e20)


def overflow_gradient(decoder: Decoder) -> None:
    decoder.get_submodule("blocks.0.mlp.gate").register_forward_hook(
        lambda module, args, out: out.register_hook(lambda gradient: gradient * torch.inf) and None
    )


@pytest.mark.parametrize(
    ("inject", "module", "what"),
    [
        (lambda d: set_parameter_value(d.embed, torch.nan), "embed", "output"),
        (
            lambda d: set_parameter_value(d.get_submodule("blocks.1.attn.v"), torch.inf),
            "blocks.1.attn.v",
            "output",
        ),
        (
            lambda d: set_parameter_value(d.get_submodule("blocks.0.mlp_norm"), torch.nan),
            "blocks.0.mlp_norm",
            "output",
        ),
        (overflow_attention_scores, "blocks.1.attn", "output"),
        (lambda d: set_parameter_value(d.head, torch.inf), "head", "output"),
        (overflow_gradient, "blocks.0.mlp.gate", "gradient"),
    ],
    ids=["embedding", "linear", "norm", "between modules", "head", "backward"],
)
def test_locates_the_first_module(inject, module, what):
    decoder = Decoder(ModelSpec.from_dict({**TINY, "tie_embeddings": False}))
    initialize(decoder, layers=2, seed=0)
    inject(decoder)

    def rerun() -> None:
        functional.cross_entropy(decoder(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()

    world = World(0, 1, torch.device("cpu"))
    assert find_non_finite([decoder], world, rerun) == NonFiniteSource(module, what, 0)
    assert not any(
        submodule._forward_hooks
        for name, submodule in decoder.named_modules()
        if not name.endswith("gate")
    )


def test_finite_numbers_have_no_source():
    decoder = Decoder(ModelSpec.from_dict(TINY))
    initialize(decoder, layers=2, seed=0)
    world = World(0, 1, torch.device("cpu"))
    assert find_non_finite([decoder], world, lambda: decoder(TOKENS).sum().backward()) is None


@pytest.mark.parametrize(
    "plan",
    [{}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3, "recompute": "full"}, {"precision": "fp8"}],
    ids=["alone", "two", "sharded and recomputed", "fp8"],
)
def test_a_run_reports_the_module(plan, train, tmp_path):
    spec = make_spec(
        None, {"global_batch_size": 4, **plan}, steps=20, optimizer={"name": "sgd", "lr": 1e20}
    )
    result = train(spec, tmp_path)
    assert {outcome["class"] for outcome in result.outcomes} == {"numerics"}
    data = next(event for event in result.events() if event["type"] == "non_finite")["data"]
    assert data["module"].startswith(("blocks.0", "embed")), "the first of many"
    assert f"first in the output of {data['module']} (rank 0)" in result.outcomes[0]["reason"]
    assert data["what"].startswith(("loss, first in", "gradient norm, first in"))
