"""Decode steps by graphs give the answers of eager steps; a stub runs a graph's work again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.inference.test_engine import MIXED, SHAPES, TINY
from workers.contracts.specs.model import ModelSpec
from workers.inference import decode_graphs
from workers.inference.decode_graphs import DecodeGraphs, Replay, round_up_batch
from workers.inference.engine import Engine
from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.kv_cache.paged_cache import PagedCache
from workers.inference.runner import Runner
from workers.inference.scheduling.policy import Limits
from workers.inference.scheduling.scheduler import Scheduler
from workers.models.decoder import Decoder


def captured(function: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """Stands for a CUDA graph: a replay computes from what the buffers hold then."""
    output = function().clone()
    return lambda: output.copy_(function()), output


def engine_with(shape: dict[str, Any], capture: Any = None) -> Engine:
    torch.manual_seed(7)
    spec = ModelSpec.from_dict({"name": "tiny", **TINY, **shape})
    decoder = Decoder(spec)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    cpu = torch.device("cpu")
    cache = PagedCache(spec, blocks=64, block_size=4, dtype=torch.float32, device=cpu)
    runner = Runner(decoder, cache)
    if capture is not None:
        runner.graphs = DecodeGraphs(runner._decode, cpu, capture=capture)
    limits = Limits(step_tokens=24, sequences=5)
    return Engine(runner, Scheduler(BlockPool(64, 4), limits), context=spec.max_seq_len)


def answers(engine: Engine) -> list[list[int]]:
    prompts = [
        [(3 * place + number) % 61 for place in range(4 + 5 * number)] for number in range(5)
    ]
    requests = [engine.add(*each) for each in zip(prompts, MIXED, strict=True)]
    while engine.busy:
        engine.step()
    return [request.output_tokens for request in requests]


@pytest.mark.parametrize("shape", ["gqa", "mha-learned", "mqa-window"])
def test_replays_give_the_answers_of_eager_steps(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "STEPS_BEFORE_CAPTURE", 1)
    expected = answers(engine_with(SHAPES[shape]))
    engine = engine_with(SHAPES[shape], captured)
    assert answers(engine) == expected
    graphs = engine.runner.graphs
    assert graphs is not None and graphs.replays > 5 and graphs.why_not is None
    # the cache was allocated again: graphs of the old memory are not used
    before = graphs.replays
    engine.runner.cache.release()
    engine.runner.cache.acquire()
    engine.take_weights(1)  # forgets cached prompts
    assert answers(engine) == expected and graphs.replays > before


def test_a_failed_capture_leaves_steps_eager() -> None:
    def fails(function: Callable[[], Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = engine_with({}, fails)
    assert answers(engine) == answers(engine_with({}))
    graphs = engine.runner.graphs
    assert graphs is not None and graphs.replays == 0 and "not permitted" in (graphs.why_not or "")


def test_batches_are_rounded_up_to_few_sizes() -> None:
    sizes = {round_up_batch(count) for count in range(1, 513)}
    assert all(round_up_batch(count) >= count for count in range(1, 513))
    assert len(sizes) == 3 + 8 + 14 and round_up_batch(65) == 96
