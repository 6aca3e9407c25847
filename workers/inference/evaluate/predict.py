"""Greedy answers to the prompts that an evaluate run judges, written line by line so that a restart
goes on after them.

Puts the engine to use; knows neither references nor metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from workers.inference.engine_builder import (
    blocks_per_request,
    build_engine,
    count_available_blocks,
)
from workers.inference.generate.answer_file import Answers
from workers.inference.model_loading import LoadedModel
from workers.inference.request import Request
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.inference.text.stop_strings import truncate_at_stop
from workers.runtime.exits import UserError


def predict(
    loaded: LoadedModel,
    prompts: Sequence[tuple[Any, list[int]]],
    answers: Answers,
    *,
    sampling: SamplingParams,
    goes_on: Callable[[int, int], bool],
) -> bool:
    """Answers `{id, text}` to prompts `(id, ids)` from `answers.done` on; whether all are there.

    `goes_on` is told how many are done, and how many tokens were made since, after every step.
    Raises UserError.
    """
    todo = prompts[answers.done :]
    if not todo:
        return True
    assert loaded.tokenizer is not None
    limits = Limits()
    wants = sorted(blocks_per_request(loaded, len(ids) + sampling.max_new_tokens) for _, ids in todo)
    fits, each_bytes = count_available_blocks(loaded)
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
    engine = build_engine(replace(loaded, decoder=decoder), blocks=blocks, limits=limits)
    place, places = answers.done, dict[Request, int]()
    while place < len(prompts) or engine.busy:
        while place < len(prompts) and len(engine.scheduler.waiting) < limits.sequences:
            places[engine.add(prompts[place][1], sampling)] = place
            place += 1
        for request in engine.step():
            if request.finish is not None:
                at = places.pop(request)
                text = truncate_at_stop(loaded.tokenizer.decode(list(request.output_tokens)), sampling.stop)
                answers.give(
                    at, {"id": prompts[at][0], "text": text, "finish_reason": request.finish}
                )
        if not goes_on(answers.done, engine.counts.prompt_tokens + engine.counts.output_tokens):
            break
    return answers.done == len(prompts)
