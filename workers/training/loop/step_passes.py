"""Forward passes before a step's own: measurements, and answers that the model writes.

Does not depend on objectives or on how a plan computes logits. Shapes: B rows of a micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import lcm

import torch

from workers.training.data.rows import RowSource
from workers.training.loop.sampling import draw_token
from workers.training.loop.step_context import MicrobatchRunner, StepContext

_MULTIPLE = 8  # kernels prefer sequence lengths that are a multiple


class StepPasses:
    """See `objective.Passes`. Under any plan; nothing is differentiated, dropout is off.

    Answers have no cache of keys and values: each new token costs a forward pass over the texts so
    far. They are the same under every plan, up to rounding of logits at the border of two tokens.
    """

    def __init__(
        self, context: StepContext, runner: MicrobatchRunner, stops: Sequence[int] = ()
    ) -> None:
        """`stops`: tokens that end an answer."""
        self.context, self.runner, self.stops = context, runner, frozenset(stops)
        self.world, self.modules = context.world, context.parallel.modules
        self._generation_s = 0.0

    @torch.no_grad()
    def measure(self, rows: RowSource, count: int) -> list[float]:
        """See `objective.Passes`."""
        for module in self.modules:
            module.eval()
        total = self.runner.evaluate(rows, count, phase="measuring")
        return list(self.world.sum_(total).tolist())

    def times(self) -> dict[str, float]:
        """`generation_s`: seconds of answers since the last call, if any; resets it."""
        taken, self._generation_s = self._generation_s, 0.0
        return {"generation_s": taken} if taken else {}

    @torch.no_grad()
    def answers(
        self, prompts: Sequence[Sequence[int]], first: int, *, max_tokens: int, temperature: float
    ) -> list[list[int]]:
        """See `objective.Passes`. Each data-parallel rank writes those of its own samples."""
        started = time.perf_counter()
        for module in self.modules:
            module.eval()
        texts = [list(prompt) for prompt in prompts]
        limits = [
            min(len(prompt) + max_tokens, self.context.run.train.seq_len) for prompt in prompts
        ]
        microbatches = self.context.microbatches(0, len(prompts))
        for index in range(len(microbatches)):
            self._write(texts, limits, index, first, temperature, len(prompts))
        self.context.parallel.release_gathered()
        self._generation_s += time.perf_counter() - started
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    def _write(
        self,
        texts: list[list[int]],
        limits: Sequence[int],
        index: int,
        first: int,
        temperature: float,
        count: int,
    ) -> None:
        """Complete the texts of every rank's micro-batch `index`; all ranks step together."""
        plan, data = self.context.run.plan, self.world.axis("dp")
        size = plan.micro_batch_size * data.size
        together = range(index * size, min((index + 1) * size, count))
        begin = index * size + data.rank * plan.micro_batch_size
        own = [row for row in range(begin, begin + plan.micro_batch_size) if row < count]
        prompt_lengths = {row: len(texts[row]) for row in together}
        draws = self.world.axis("tp").rank == 0
        multiple = lcm(_MULTIPLE, 2 * plan.cp * plan.tp)
        while True:
            open_rows = [
                row
                for row in together
                if self._is_open(texts[row], prompt_lengths[row], limits[row])
            ]
            if not open_rows:
                return
            self.context.progress.enter("generating")
            longest = max(len(texts[row]) for row in together)
            length = min(-(-longest // multiple) * multiple, self.context.run.train.seq_len)
            tokens = torch.zeros(plan.micro_batch_size, length, dtype=torch.int64)
            for place, row in enumerate(own):
                tokens[place, : len(texts[row])] = torch.tensor(texts[row])
            ends = [len(texts[row]) - 1 for row in own]
            ends += [0] * (plan.micro_batch_size - len(own))
            logits = self.runner.logits(tokens.to(self.world.device), ends)
            chosen = torch.zeros(len(together), dtype=torch.int64)
            for place, row in enumerate(own):
                if draws and place in logits and row in open_rows:
                    seed = (self.context.run.train.seed, "answers", first + row, len(texts[row]))
                    chosen[row - together.start] = draw_token(logits[place], temperature, seed)
            # each number comes from one rank
            every = self.world.sum_(chosen.to(self.world.device)).tolist()
            for row in open_rows:
                texts[row].append(int(every[row - together.start]))

    def _is_open(self, text: Sequence[int], prompt: int, limit: int) -> bool:
        ended = len(text) > prompt and text[-1] in self.stops
        return not ended and len(text) < limit
