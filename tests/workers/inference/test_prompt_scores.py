"""Log-probabilities of prompts: the model's own, in chunks, next to a prefix cache, preempted."""

from __future__ import annotations

import pytest
import torch

from tests.workers.inference.test_engine import engine_of, model_of
from workers.inference.sampling.parameters import SamplingParams


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(0, 61, (40,), generator=generator).tolist()
    return [
        shared[: 10 + 4 * number]
        + torch.randint(0, 61, (6 + number,), generator=generator).tolist()
        for number in range(count)
    ]


def expected(prompt: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = model_of()(torch.tensor([prompt]))[0].log_softmax(-1)
    return [float(logprobs[place, token]) for place, token in enumerate(prompt[1:])]


@pytest.mark.parametrize(
    ("blocks", "step_tokens"), [(200, 64), (200, 7), (16, 64)], ids=["whole", "chunks", "few"]
)
def test_scores_are_those_of_the_model(blocks, step_tokens):
    engine = engine_of(model_of(), blocks=blocks, step_tokens=step_tokens, sequences=5, watermark=0)
    warm = engine.add(prompts(8)[-1], SamplingParams(max_new_tokens=1))
    while engine.busy:
        engine.step()
    assert warm.finish
    requests = [
        engine.add(
            prompt,
            SamplingParams(
                max_new_tokens=number % 3 * 6, temperature=0, prompt_logprobs=number % 4
            ),
        )
        for number, prompt in enumerate(prompts(8))
    ]
    others = [engine.add(prompt, SamplingParams(max_new_tokens=4)) for prompt in prompts(4)]
    done = set()
    while engine.busy:
        done.update(engine.step())
    assert done >= {*requests, *others}
    for number, request in enumerate(requests):
        scores = request.prompt_scores
        assert [score.token for score in scores] == list(request.prompt[1:])
        assert [score.logprob for score in scores] == pytest.approx(
            expected(list(request.prompt)), abs=1e-5
        )
        assert {len(score.top) for score in scores} == {number % 4}
        if number % 4:
            assert all((score.rank == 1) == (score.top[0][0] == score.token) for score in scores)
        assert len(request.output_tokens) == number % 3 * 6
    assert all(request.cached_tokens == 0 for request in requests)
    assert blocks > 16 or engine.scheduler.preemption.count
    assert engine.scheduler.pool.used == 0


def test_a_prompt_may_fill_the_context_if_nothing_follows():
    engine = engine_of(model_of(), blocks=200)
    prompt = [number % 61 for number in range(engine.context)]
    request = engine.add(prompt, SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    while engine.busy:
        engine.step()
    assert len(request.prompt_scores) == len(prompt) - 1 and request.finish == "length"
    with pytest.raises(ValueError, match="at most 127 to leave room"):
        engine.add(prompt, SamplingParams(max_new_tokens=1, prompt_logprobs=0))
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        SamplingParams(max_new_tokens=0)
    with pytest.raises(ValueError, match="does not support prompt_logprobs"):
        SamplingParams(beams=2, prompt_logprobs=0)
