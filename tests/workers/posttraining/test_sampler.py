"""The sampler: its share of memory, and no cached keys and values of earlier weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.workers.posttraining.test_policy_runs import TINY
from workers.contracts.specs.finetuning.reinforcement import RolloutSpec
from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.weights.parameter_shapes import named_weights
from workers.posttraining.reinforcement.sampling import sampler as module
from workers.posttraining.reinforcement.sampling.sampler import Sampler
from workers.training.parallel.mesh import World

PROMPT = list(range(1, 18))  # longer than a block


def build(*, ranks: int = 1, nodes: int = 1):
    """A sampler of random weights, and the decoder that is trained."""
    spec = ModelSpec(**TINY)
    torch.manual_seed(0)
    trained = Decoder(spec)
    for parameter in trained.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    world = World(0, ranks * nodes, torch.device("cpu"))
    train = SimpleNamespace(objective="grpo")
    run = SimpleNamespace(model=spec, plan=SimpleNamespace(precision="fp32"), train=train)
    parallel = SimpleNamespace(weights=lambda: named_weights(trained), parts=[trained])
    context = SimpleNamespace(run=run, world=world, parallel=parallel)
    options = RolloutSpec(max_new_tokens=6)
    return Sampler(context, options, [], longest=24, node_ranks=ranks), trained


def answered(sampler):
    [answers] = sampler.sample([(PROMPT, 5)], answers=3, on_step=lambda: None)
    return answers


@torch.no_grad()
def test_answers_after_an_update_use_no_keys_of_earlier_weights():
    """Equal to those of a sampler that never saw the earlier weights, on the same prompt."""
    used, trained = build()
    used.sync(0)
    before = answered(used)
    for parameter in trained.parameters():
        parameter.add_(
            0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        )
    used.sync(1)
    after = answered(used)
    fresh, other = build()
    other.load_state_dict(trained.state_dict())
    fresh.sync(1)
    expected = answered(fresh)
    assert used.version == 1
    assert [each.token_ids for each in after] == [each.token_ids for each in expected]
    for each, exact in zip(after, expected, strict=True):
        assert each.logprobs == pytest.approx(exact.logprobs, abs=1e-6)
    assert [each.logprobs for each in before] != [each.logprobs for each in after]


def test_ranks_of_a_node_share_its_memory_and_nodes_do_not(monkeypatch):
    monkeypatch.setattr(module, "count_available_blocks", lambda loaded: (8, 1))
    requested = []

    def built(loaded, *, blocks, **more):
        requested.append(blocks)
        return build_engine(loaded, blocks=blocks, **more)

    build_engine = module.build_engine
    monkeypatch.setattr(module, "build_engine", built)
    for ranks, nodes in ((1, 1), (1, 4)):
        sampler, _ = build(ranks=ranks, nodes=nodes)
        sampler.sync(0)
        answered(sampler)
    assert requested == [7, 7]
    sampler, _ = build(ranks=4)
    sampler.sync(0)
    with pytest.raises(module.UserError, match="holds the keys and values of 1 answers"):
        answered(sampler)
