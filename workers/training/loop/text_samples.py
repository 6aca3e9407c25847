"""Texts that the model writes while it is trained: at checkpoints, by the same passes that validate
it, under any plan.

Knows prompts and logits; does not know how a plan computes them. Shapes: B texts, S positions, V
vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import lcm
from typing import Any

import torch
from torch import Tensor

from workers.contracts.specs.run_bodies import SamplesSpec
from workers.metrics.recorder import Recorder
from workers.models.initialise import derived_seed
from workers.training.data.prompts import Prompts
from workers.training.loop.microbatches import Passes
from workers.training.parallel.parallelize import Parallel
from workers.training.setup.spec_loading import TrainingRun

# of an attempt's time that writing may take, and seconds beside it, so that a short run has its
# texts too
SHARE, GRACE_S = 0.02, 3.0
_ROUND = 8  # positions: sequences whose length is a multiple suit kernels


class Writer:
    """`write` on all ranks. For each new token the whole text goes through the model, all texts at
    once.

    Texts are those of one process under every plan as far as logits are: a token changes only where
    its draw falls
    within rounding of the border between two.
    """

    def __init__(
        self,
        run: TrainingRun,
        spec: SamplesSpec,
        prompts: Prompts,
        *,
        parallel: Parallel,
        passes: Passes,
        recorder: Recorder,
        tell: Callable[[str], None],
    ) -> None:
        self.run, self.spec, self.prompts, self.recorder, self.tell = (
            run,
            spec,
            prompts,
            recorder,
            tell,
        )
        self.parallel, self.passes, self.world = parallel, passes, parallel.world
        plan, seq_len = run.plan, run.train.seq_len
        unit = lcm(_ROUND, plan.cp * plan.tp)
        longest = max(map(len, prompts.ids))
        wanted = -(-(longest + spec.max_tokens) // unit) * unit
        self.length = min(wanted, seq_len)  # which a plan's axes divide
        self._began, self._spent_s = time.perf_counter(), 0.0

    @torch.no_grad()
    def write(self, step: int) -> None:
        """Tell the texts of `step` by event, cut short where the time for them is over, or none at
        all.
        """
        started = time.perf_counter()
        self.tell("samples")
        budget_s = GRACE_S + SHARE * (started - self._began) - self._spent_s
        if self._all_know([], late=budget_s <= 0)[-1]:
            return
        for module in self.parallel.modules:
            module.eval()
        texts, late = self._texts(until=started + budget_s)
        for module in self.parallel.modules:
            module.train()
        self.parallel.release_gathered()
        seconds = time.perf_counter() - started
        self._spent_s += seconds
        if self.world.rank == 0:
            told = [
                self._told(prompt, new) for prompt, new in zip(self.prompts.ids, texts, strict=True)
            ]
            self.recorder.event(
                "samples_written",
                step=step,
                samples=told,
                temperature=self.spec.temperature,
                seconds=round(seconds, 3),
                cut_short=late,
            )

    def _texts(self, *, until: float) -> tuple[list[list[int]], bool]:
        """New ids of every text, and whether time was over."""
        written = [list(ids) for ids in self.prompts.ids]
        begins = [len(ids) for ids in written]
        tokens_BS = torch.zeros(
            len(written), self.length, dtype=torch.int64, device=self.world.device
        )
        for row, ids in enumerate(written):
            tokens_BS[row, : len(ids)] = torch.tensor(ids)
        late = False
        while not late and (
            open_rows := [row for row in range(len(written)) if self._goes_on(row, written[row])]
        ):
            self.tell("samples")
            found = self.passes.logits(tokens_BS, [len(ids) - 1 for ids in written])
            # those that hold the same logits leave it to one of them
            speaks = self.world.axis("dp").rank == self.world.axis("tp").rank == 0
            own = [
                self._next(row, len(written[row]), found[row]) if speaks and row in found else 0
                for row in open_rows
            ]
            *chosen, flag = self._all_know(own, late=time.perf_counter() > until)
            for row, token in zip(open_rows, chosen, strict=True):
                tokens_BS[row, len(written[row])] = token
                written[row].append(token)
            late = bool(flag)
        cut_short = late and any(self._goes_on(row, ids) for row, ids in enumerate(written))
        return [ids[begin:] for ids, begin in zip(written, begins, strict=True)], cut_short

    def _goes_on(self, row: int, ids: list[int]) -> bool:
        begin = len(self.prompts.ids[row])
        ended = len(ids) > begin and ids[-1] == self.prompts.end
        return not ended and len(ids) < min(self.length, begin + self.spec.max_tokens)

    def _next(self, row: int, place: int, logits_V: Tensor) -> int:
        """The token drawn for `place` of a text, from a number that text and place alone decide."""
        logits = logits_V.double().cpu()
        if self.spec.temperature == 0:
            return int(logits.argmax())
        generator = torch.Generator().manual_seed(
            derived_seed(self.run.train.seed, "samples", row, place)
        )
        drawn = torch.rand((), dtype=torch.float64, generator=generator)
        up_to = torch.softmax(logits / self.spec.temperature, 0).cumsum(0)
        return min(int(torch.searchsorted(up_to, drawn * up_to[-1], right=True)), len(up_to) - 1)

    def _all_know(self, own: list[int], *, late: bool) -> list[int]:
        """Each number from the one rank that has it, and whether rank 0 is late."""
        told = torch.tensor([*own, int(late and self.world.rank == 0)], device=self.world.device)
        found: list[int] = self.world.sum_(told).tolist()
        return found

    def _told(self, prompt: list[int], new: list[int]) -> dict[str, Any]:
        return {
            "prompt": self.prompts.words(prompt),
            "text": self.prompts.continuation(prompt, new),
            "prompt_ids": prompt,
            "token_ids": new,
            "ended": bool(new) and new[-1] == self.prompts.end,
        }
