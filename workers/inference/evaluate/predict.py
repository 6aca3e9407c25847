"""Greedy answers to the prompts of an evaluate run, written line by line to survive a restart.

Does not depend on references or metrics.
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
from workers.inference.generate.answer_file import AnswerFile
from workers.inference.model_loading import LoadedModel
from workers.inference.request import Request
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.inference.text.stop_strings import truncate_at_stop
from workers.runtime.exit_codes import UserError


def predict(
    loaded: LoadedModel,
    prompts: Sequence[tuple[Any, list[int]]],
    answers: AnswerFile,
    *,
    sampling: SamplingParams,
    on_progress: Callable[[int, int], bool],
) -> bool:
    """Answer prompts `(id, ids)` from `answers.done` on; whether all are answered.

    After every step `on_progress` gets the number of answers and of tokens; False stops. Raises
    UserError.
    """
    pending = prompts[answers.done :]
    if not pending:
        return True
    assert loaded.tokenizer is not None
    limits = Limits()
    needed = sorted(
        blocks_per_request(loaded, len(ids) + sampling.max_new_tokens) for _, ids in pending
    )
    available, block_bytes = count_available_blocks(loaded)
    if needed[-1] > available:
        raise UserError(
            f"evaluate: the longest prompt needs {needed[-1]} blocks, its cache of "
            f"{needed[-1] * block_bytes:,} bytes does not fit next to the weights. Use fewer "
            "max_new_tokens."
        )
    blocks = min(available, int(sum(needed[-limits.sequences :]) * (1 + 2 * limits.watermark)) + 2)
    # the engine changes its decoder: copy it with shared tensors, so that likelihoods use the
    # original
    tensors = [*loaded.decoder.parameters(), *loaded.decoder.buffers()]
    decoder = deepcopy(loaded.decoder, {id(tensor): tensor for tensor in tensors})
    engine = build_engine(replace(loaded, decoder=decoder), blocks=blocks, limits=limits)
    index, indices = answers.done, dict[Request, int]()
    while index < len(prompts) or engine.busy:
        while index < len(prompts) and len(engine.scheduler.waiting) < limits.sequences:
            indices[engine.add(prompts[index][1], sampling)] = index
            index += 1
        for request in engine.step():
            if request.finish is not None:
                at = indices.pop(request)
                text = loaded.tokenizer.decode(list(request.output_tokens))
                text = truncate_at_stop(text, sampling.stop)
                answers.write(
                    at, {"id": prompts[at][0], "text": text, "finish_reason": request.finish}
                )
        if not on_progress(answers.done, engine.counts.prompt_tokens + engine.counts.output_tokens):
            break
    return answers.done == len(prompts)
