"""Greedy answers to the prompts that an evaluate run judges, written line by line so that a restart
goes on after them.

Puts the engine to use; knows neither references nor metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from workers.contracts.wire.exits import UserError
from workers.inference.build import blocks_that_fit, blocks_wanted, build
from workers.inference.generate.answer_file import Answers
from workers.inference.load import Loaded
from workers.inference.request import Request
from workers.inference.sampling import Sampling
from workers.inference.scheduler import Limits
from workers.inference.stop_strings import until_stop


def predict(
    loaded: Loaded,
    prompts: Sequence[tuple[Any, list[int]]],
    answers: Answers,
    *,
    sampling: Sampling,
    goes_on: Callable[[int, int], bool],
) -> bool:
    """Answers `{id, text}` to prompts `(id, ids)` from `answers.done` on; whether all are there.

    `goes_on` is told how many are done, and how many tokens were made since, after every step.
    Raises UserError.
    """
    todo = prompts[answers.done :]
    if not todo:
        return True
    assert loaded.words is not None
    limits = Limits()
    wants = sorted(blocks_wanted(loaded, len(ids) + sampling.max_new_tokens) for _, ids in todo)
    fits, each_bytes = blocks_that_fit(loaded)
    if wants[-1] > fits:
        message = f"its cache of {wants[-1] * each_bytes:,} bytes does not fit beside the weights"
        raise UserError(
            f"evaluate: the longest prompt wants {wants[-1]} blocks, {message}; try fewer "
            "max_new_tokens"
        )
    blocks = min(fits, int(sum(wants[-limits.sequences :]) * (1 + 2 * limits.watermark)) + 2)
    # the engine gives a decoder its cache: another of the same tensors, so that likelihoods are
    # read by the plain one
    tensors = [*loaded.decoder.parameters(), *loaded.decoder.buffers()]
    decoder = deepcopy(loaded.decoder, {id(each): each for each in tensors})
    engine = build(replace(loaded, decoder=decoder), blocks=blocks, limits=limits)
    place, places = answers.done, dict[Request, int]()
    while place < len(prompts) or engine.busy:
        while place < len(prompts) and len(engine.scheduler.waiting) < limits.sequences:
            places[engine.add(prompts[place][1], sampling)] = place
            place += 1
        for request in engine.step():
            if request.finish is not None:
                at = places.pop(request)
                text = until_stop(loaded.words.decode(list(request.new_tokens)), sampling.stop)
                answers.give(
                    at, {"id": prompts[at][0], "text": text, "finish_reason": request.finish}
                )
        if not goes_on(answers.done, engine.counts.prompt_tokens + engine.counts.new_tokens):
            break
    return answers.done == len(prompts)
