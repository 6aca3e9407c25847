"""Texts that the model generates at checkpoints, under any plan, by the validation forward passes.

Does not depend on how a plan computes logits. Shapes: B texts, S positions, V vocabulary.
"""

from __future__ import annotations

import time
from math import lcm
from typing import Any

import torch
from torch import Tensor

from workers.contracts.specs.train import SamplesSpec
from workers.training.data.prompts import Prompts
from workers.training.loop.sampling import draw_token
from workers.training.loop.step_context import MicrobatchRunner, StepContext

# share of an attempt's time for text samples, plus seconds so that a short run has some too
SHARE, GRACE_S = 0.02, 3.0
_MULTIPLE = 8  # kernels prefer sequence lengths that are a multiple


class SampleWriter:
    """Call `write` on all ranks. For each new token, all texts go through the model in full.

    Texts are the same under every plan, up to logits: a token differs only if its random draw falls
    within rounding of the border between two.
    """

    def __init__(
        self, context: StepContext, spec: SamplesSpec, prompts: Prompts, runner: MicrobatchRunner
    ) -> None:
        self.context, self.spec, self.prompts, self.runner = context, spec, prompts, runner
        self.world, self.parallel = context.world, context.parallel
        plan, seq_len = context.run.plan, context.run.train.seq_len
        multiple = lcm(_MULTIPLE, plan.cp * plan.tp)
        longest = max(map(len, prompts.ids))
        length = -(-(longest + spec.max_tokens) // multiple) * multiple
        self.length = min(length, seq_len)  # which the plan's axes divide
        self._created, self._spent_s = time.perf_counter(), 0.0

    @torch.no_grad()
    def write(self, step: int) -> None:
        """Record the texts of `step` as an event, cut short or left out if the time is used up."""
        started = time.perf_counter()
        self.context.progress.enter("samples")
        budget_s = GRACE_S + SHARE * (started - self._created) - self._spent_s
        if self._share([], late=budget_s <= 0)[-1]:
            return
        for module in self.parallel.modules:
            module.eval()
        texts, late = self._generate(until=started + budget_s)
        for module in self.parallel.modules:
            module.train()
        self.parallel.release_gathered()
        seconds = time.perf_counter() - started
        self._spent_s += seconds
        if self.world.rank == 0:
            samples = [
                self._describe(prompt, new)
                for prompt, new in zip(self.prompts.ids, texts, strict=True)
            ]
            self.context.recorder.event(
                "samples_written",
                step=step,
                samples=samples,
                temperature=self.spec.temperature,
                seconds=round(seconds, 3),
                cut_short=late,
            )

    def _generate(self, *, until: float) -> tuple[list[list[int]], bool]:
        """New ids of every text, and whether time ran out."""
        written = [list(ids) for ids in self.prompts.ids]
        begins = [len(ids) for ids in written]
        tokens_BS = torch.zeros(
            len(written), self.length, dtype=torch.int64, device=self.world.device
        )
        for row, ids in enumerate(written):
            tokens_BS[row, : len(ids)] = torch.tensor(ids)
        late = False
        while not late and (
            open_rows := [row for row in range(len(written)) if self._is_open(row, written[row])]
        ):
            self.context.progress.enter("samples")
            logits = self.runner.logits(tokens_BS, [len(ids) - 1 for ids in written])
            # of ranks with the same logits, one draws
            draws = self.world.axis("dp").rank == self.world.axis("tp").rank == 0
            own = [
                self._next(row, len(written[row]), logits[row]) if draws and row in logits else 0
                for row in open_rows
            ]
            *chosen, flag = self._share(own, late=time.perf_counter() > until)
            for row, token in zip(open_rows, chosen, strict=True):
                tokens_BS[row, len(written[row])] = token
                written[row].append(token)
            late = bool(flag)
        cut_short = late and any(self._is_open(row, ids) for row, ids in enumerate(written))
        return [ids[begin:] for ids, begin in zip(written, begins, strict=True)], cut_short

    def _is_open(self, row: int, ids: list[int]) -> bool:
        begin = len(self.prompts.ids[row])
        ended = len(ids) > begin and ids[-1] == self.prompts.end
        return not ended and len(ids) < min(self.length, begin + self.spec.max_tokens)

    def _next(self, row: int, position: int, logits_V: Tensor) -> int:
        """The token at `position` of a text, drawn with a seed of text and position."""
        seed = (self.context.run.train.seed, "samples", row, position)
        return draw_token(logits_V, self.spec.temperature, seed)

    def _share(self, own: list[int], *, late: bool) -> list[int]:
        """Sum over ranks: each number comes from one rank; the last is whether rank 0 is late."""
        numbers = torch.tensor([*own, int(late and self.world.rank == 0)], device=self.world.device)
        total: list[int] = self.world.sum_(numbers).tolist()
        return total

    def _describe(self, prompt: list[int], new: list[int]) -> dict[str, Any]:
        return {
            "prompt": self.prompts.text(prompt),
            "text": self.prompts.continuation(prompt, new),
            "prompt_ids": prompt,
            "token_ids": new,
            "ended": bool(new) and new[-1] == self.prompts.end,
        }
