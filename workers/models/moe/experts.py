"""The routed experts of a layer with stacked weights, and the permutation of tokens by expert.

Does not depend on how tokens were routed. Shapes: T tokens, K experts per token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.specs.model import ModelSpec, Moe
from workers.models.layers.documents import Documents
from workers.models.layers.mlp import ACTIVATIONS
from workers.models.layers.operations import KernelOperations

# rows by expert, weights `[E, out, in]`, rows of each → products
Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]


class StackedLinear(nn.Module):
    """One linear layer per expert: `weight` `[E, out, in]`, `bias` `[E, out]` or None."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None

    def forward(self, rows_by_expert: list[Tensor]) -> list[Tensor]:
        """Each expert's linear layer on its own rows.

        Experts without a token still get a gradient, of zeros.
        """
        biases = [None] * len(rows_by_expert) if self.bias is None else self.bias.unbind()
        return [
            functional.linear(rows, weight, bias)
            for rows, weight, bias in zip(rows_by_expert, self.weight.unbind(), biases, strict=True)
        ]

    def of_rows(
        self, rows: Tensor, counts_E: Tensor, expert_A: Tensor | None, grouped: Grouped
    ) -> Tensor:
        """All rows with one product, `[A, out]`; `expert_A` is each row's expert, E for none."""
        out = grouped(rows, self.weight, counts_E)
        if self.bias is None or expert_A is None:
            return out
        return out + functional.pad(self.bias, (0, 0, 0, 1))[expert_A]


class Experts(nn.Module):
    """`[T, hidden]` → `[T, hidden]`: the weighted sum of each token's K experts."""

    operations: type[KernelOperations] = KernelOperations

    def __init__(self, spec: ModelSpec, moe: Moe) -> None:
        super().__init__()
        bias = spec.bias == "all"
        self.experts, self.activation = moe.experts, ACTIVATIONS[spec.activation]
        self.gate = (
            StackedLinear(moe.experts, spec.hidden, moe.expert_ffn, bias=bias)
            if spec.gated_mlp
            else None
        )
        self.up = StackedLinear(moe.experts, spec.hidden, moe.expert_ffn, bias=bias)
        self.down = StackedLinear(moe.experts, moe.expert_ffn, spec.hidden, bias=bias)
        # for experts on several ranks: runs in place of `mlp`
        self.exchange: Callable[[Tensor, Tensor, int | None], Tensor] | None = None

    def forward(
        self, x_T: Tensor, weights_TK: Tensor, chosen_TK: Tensor, most: int | None = None
    ) -> Tensor:
        """`chosen_TK` are experts 0 to E - 1, or E for a dropped assignment.

        `most`: assignments that no expert exceeds, if known.
        """
        permuted = self.operations.permuted(x_T, chosen_TK, self.experts)
        if permuted is not None:
            rows, permutation = permuted
            done = self.through(rows, permutation.counts, most)
            if len(done) < len(rows):
                done = torch.cat([done, done.new_zeros(len(rows) - len(done), done.shape[1])])
            return self.operations.unpermuted(done, permutation, weights_TK)
        top_k, flat = chosen_TK.shape[1], chosen_TK.flatten()
        order = flat.argsort(stable=True)
        counts_E = torch.bincount(flat, minlength=self.experts + 1)[:-1]
        sorted_x = x_T[order // top_k]
        done = self.through(sorted_x, counts_E, most)
        sorted_out = torch.cat([done, done.new_zeros(len(sorted_x) - len(done), done.shape[1])])
        # gathered by the inverse order and summed, not added by index: the same sum in every run
        out_TK = sorted_out[order.argsort()].reshape(*chosen_TK.shape, -1)
        weighted: Tensor = out_TK * weights_TK.unsqueeze(-1).to(out_TK.dtype)
        return weighted.sum(1)

    def through(self, sorted_x: Tensor, counts_E: Tensor, most: int | None = None) -> Tensor:
        """Outputs of the first rows of `sorted_x`, `counts_E[e]` of them for expert e in order.

        Later rows are dropped: their outputs are zeros or missing.
        """
        if self.exchange is None:
            return self.mlp(sorted_x, counts_E)
        return self.exchange(sorted_x, counts_E, most)

    def mlp(self, rows: Tensor, counts_E: Tensor, counts: list[int] | None = None) -> Tensor:
        """`through` for this rank's experts; `counts` is `counts_E` if the host has it."""
        if self._takes_rows() and self.operations.at_once(rows, self.up.weight):
            return self._at_once(rows, counts_E)
        sizes: list[int] = counts_E.tolist() if counts is None else counts
        return torch.cat(self._by_expert(list(torch.split(rows[: sum(sizes)], sizes))))

    def _takes_rows(self) -> bool:
        """False if a linear layer was replaced by one that quantizes each expert separately."""
        linears = [linear for linear in (self.gate, self.up, self.down) if linear is not None]
        return all(
            type(linear) is StackedLinear and "forward" not in vars(linear) for linear in linears
        )

    def _at_once(self, rows: Tensor, counts_E: Tensor) -> Tensor:
        grouped, expert_A = self.operations.grouped, None
        if self.up.bias is not None:
            places = torch.arange(len(rows), device=rows.device)
            expert_A = torch.searchsorted(counts_E.cumsum(0), places, right=True)
        inner = self.up.of_rows(rows, counts_E, expert_A, grouped)
        if self.gate is None:
            inner = self.activation(inner)
        else:
            inner = self.operations.gated(
                self.gate.of_rows(rows, counts_E, expert_A, grouped), inner, self.activation
            )
        return self.down.of_rows(inner, counts_E, expert_A, grouped)

    def _by_expert(self, rows_by_expert: list[Tensor]) -> list[Tensor]:
        inner: list[Tensor] = self.up(rows_by_expert)
        if self.gate is None:
            inner = [self.activation(up) for up in inner]
        else:
            pairs = zip(self.gate(rows_by_expert), inner, strict=True)
            inner = [self.operations.gated(gate, up, self.activation) for gate, up in pairs]
        out: list[Tensor] = self.down(inner)
        return out


def most_assignments(batch: int, length: int, *, top_k: int, experts: int, capacity: float) -> int:
    """Assignments of `batch` sequences that `drop_beyond_capacity` leaves an expert at most."""
    return batch * min(length, math.ceil(capacity * length * top_k / experts))


def drop_beyond_capacity(
    chosen_BSK: Tensor, *, experts: int, capacity: float, documents: Documents | None = None
) -> Tensor:
    """`chosen_BSK` with assignments beyond an expert's capacity set to `experts`.

    An expert takes ceil(capacity · S · K / E) tokens of each sequence, first choices before second
    ones, earlier tokens before later ones (GShard, arXiv 2006.16668, algorithm 1, with sequences as
    groups, so that the result does not depend on how a batch is distributed over ranks and
    micro-batches). With packed `documents` each document is a group.
    """
    batch, length, top_k = chosen_BSK.shape
    if documents is not None and not documents.whole:
        return _drop_by_document(
            chosen_BSK, experts=experts, capacity=capacity, documents=documents
        )
    most = math.ceil(capacity * length * top_k / experts)
    by_rank = chosen_BSK.transpose(1, 2).reshape(batch, top_k * length)
    assigned = functional.one_hot(by_rank, experts)
    place = (assigned.cumsum(1) - assigned).gather(2, by_rank.unsqueeze(-1)).squeeze(-1)
    retained = by_rank.masked_fill(place >= most, experts)
    return retained.reshape(batch, top_k, length).transpose(1, 2)


def _drop_by_document(
    chosen_BSK: Tensor, *, experts: int, capacity: float, documents: Documents
) -> Tensor:
    chosen_TK, device = chosen_BSK.flatten(0, 1), chosen_BSK.device
    lengths = [stop - start for start, stop in pairwise(documents.places)]
    most = torch.tensor(
        [math.ceil(capacity * length * chosen_TK.shape[1] / experts) for length in lengths]
    )
    document_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
    most_T = most.to(device)[document_T]
    # by earlier choices
    taken_DE = torch.zeros(len(lengths), experts, dtype=torch.int64, device=device)
    retained = []
    for chosen_T in chosen_TK.unbind(1):
        assigned_TE = functional.one_hot(chosen_T, experts)
        here_DE = torch.zeros_like(taken_DE).index_add_(0, document_T, assigned_TE)
        before_DE = here_DE.cumsum(0) - here_DE  # in the documents before
        place_TE = assigned_TE.cumsum(0) - assigned_TE + (taken_DE - before_DE)[document_T]
        place_T = place_TE.gather(1, chosen_T.unsqueeze(1)).squeeze(1)
        retained.append(chosen_T.masked_fill(place_T >= most_T, experts))
        taken_DE += here_DE
    return torch.stack(retained, 1).view_as(chosen_BSK)
