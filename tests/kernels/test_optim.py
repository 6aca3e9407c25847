"""unscale_ and FusedAdamW on a CPU: torch's rule, state exchanged with torch's AdamW, and bad
arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kernels import FusedAdamW, dispatch, explain, runtime, unscale_
from kernels.optim import reference, tensor_table


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))


def test_unscale_matches_torch() -> None:
    for backend in ("torch", "reference"):
        grads = [torch.full((3,), 4.0), torch.full((2, 2), 8.0, dtype=torch.bfloat16)]
        nonfinite = torch.zeros(1)
        unscale_(grads, torch.tensor([0.5]), nonfinite, backend=backend)
        assert (
            grads[0].tolist() == [2, 2, 2]
            and grads[1].unique().tolist() == [4]
            and nonfinite.item() == 0
        )
        grads[0][1] = float("nan")
        unscale_(grads, torch.tensor([0.5]), nonfinite, backend=backend)
        assert nonfinite.item() == 1


@pytest.mark.parametrize("clip", [None, 0.1])
def test_it_matches_torchs_adamw_and_exchanges_state(clip: float | None) -> None:
    dispatch.clear_records()
    ours, theirs = model(), model()
    mine: Any = FusedAdamW(ours.parameters(), lr=0.01, clip_norm=clip)
    other: Any = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for turn in range(2):
        for _ in range(6):
            x = torch.randn(4, 5)
            for net, optimizer in ((ours, mine), (theirs, other)):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                if clip is not None and isinstance(optimizer, torch.optim.AdamW):
                    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        if turn == 0:
            saved = copy.deepcopy(mine.state_dict()), copy.deepcopy(other.state_dict())
            mine = FusedAdamW(ours.parameters(), lr=0.3, clip_norm=clip)
            other = torch.optim.AdamW(theirs.parameters(), lr=0.3)
            mine.load_state_dict(saved[1])
            other.load_state_dict(saved[0])
    if clip is not None:
        torch.testing.assert_close(mine.grad_norm, norm.view(1))
    assert explain()[0]["backend"] == ("torch" if clip is None else "reference")


def test_bf16_parameters_keep_fp32_moments_through_a_checkpoint() -> None:
    p = torch.ones(50, dtype=torch.bfloat16).requires_grad_()
    p.grad = torch.full_like(p, 0.3)
    optimizer = FusedAdamW([p], stochastic_rounding=True)
    optimizer.step()
    again = FusedAdamW([p])
    again.load_state_dict(optimizer.state_dict())
    assert again.state[p]["exp_avg"].dtype == torch.float32 and again.state[p]["step"].item() == 1
    torch.testing.assert_close(
        again.state[p]["exp_avg"], optimizer.state[p]["exp_avg"], rtol=0, atol=0
    )


def test_stochastic_rounding_keeps_the_expectation() -> None:
    x = torch.full((20000,), 1 + 2**-9)
    rounded = reference.round_stochastically(x).float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    assert abs(rounded.mean().item() - x[0].item()) < 4 * 2**-7 * 0.44 / 141  # four standard errors
    assert reference.round_stochastically(torch.tensor([float("inf")])).isinf().all()


def test_an_overflow_changes_nothing() -> None:
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.tensor([1.0, float("nan"), 1.0])
    optimizer = FusedAdamW([p])
    optimizer.step(inv_scale=torch.tensor([1.0]))
    assert optimizer.skipped is not None and optimizer.skipped.item() == 1
    assert p.tolist() == [1, 1, 1] and optimizer.state[p]["step"].item() == 0


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters_step_with_a_given_norm(
    one_rank: DeviceMesh,
) -> None:
    def inputs(sharded: bool) -> tuple[torch.Tensor, FusedAdamW]:
        p, g = torch.arange(6.0).view(3, 2), torch.ones(3, 2)
        if sharded:
            p, g = (distribute_tensor(t, one_rank, [Shard(0)]) for t in (p, g))
        p.requires_grad_()
        p.grad = g
        return p, FusedAdamW([p], clip_norm=1.0)

    (plain, one), (sharded, other) = inputs(False), inputs(True)
    with pytest.raises(ValueError, match="grad_norm"):
        other.step()
    norm = torch.tensor([6.0]).sqrt()
    one.step()
    other.step(grad_norm=norm)
    torch.testing.assert_close(one.grad_norm, norm)
    torch.testing.assert_close(sharded.full_tensor(), plain)  # type: ignore[attr-defined]
    assert isinstance(other.state[sharded]["exp_avg"], DTensor)
    other.step(grad_norm=torch.tensor([float("inf")]), inv_scale=torch.ones(1))
    assert (
        other.skipped is not None
        and other.skipped.item() == 1
        and other.state[sharded]["step"].item() == 1
    )


def test_bad_arguments_raise_errors_that_name_them() -> None:
    p = torch.ones(3, requires_grad=True)
    scale, nonfinite = torch.ones(1), torch.zeros(1)
    with pytest.raises(TypeError, match=r"grads\[1\] is int64"):
        unscale_([torch.ones(2), torch.ones(2).long()], scale, nonfinite)
    with pytest.raises(ValueError, match=r"grads\[0\] is on meta"):
        unscale_([torch.ones(2, device="meta")], scale, nonfinite)
    with pytest.raises(ValueError, match="inv_scale has shape"):
        unscale_([torch.ones(2)], torch.ones(2), nonfinite)
    with pytest.raises(TypeError, match="found_inf is bool"):
        unscale_([torch.ones(2)], scale, torch.zeros(1, dtype=torch.bool))
    for change, message in (
        ({"lr": -1.0}, "lr is"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
        ({"clip_norm": 0}, "clip_norm"),
    ):
        with pytest.raises(ValueError, match=message):
            FusedAdamW([p], **change)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="parameter 1 is float64"):
        FusedAdamW([p, torch.ones(2, dtype=torch.float64, requires_grad=True)])
    optimizer = FusedAdamW([p])
    p.grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(TypeError, match="lr is a tensor"):
        optimizer.step()
    with pytest.raises(ValueError, match="grad_norm has shape"):
        FusedAdamW([p]).step(grad_norm=torch.ones(2))


def test_tables_made_during_a_capture_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their copies run at replays only, so an eager call must not find them in the cache."""
    device, numbers = torch.device("cpu"), (3, 1, 4)
    row = (torch.ones(5), torch.ones(5))

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        sent = tensor_table.to_device(numbers, (3,), torch.int64, device)
        return sent, tensor_table.tables([row])[0].chunk_tensor

    eager = make()
    assert all(a is b for a, b in zip(eager, make(), strict=True))
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "is_capturing", lambda device: True)
        patched.setattr(tensor_table, "_captured", tensors := list[torch.Tensor]())
        captured = make()
    assert not any(a is b for a, b in zip(eager, captured, strict=True))
    assert all(any(each is other for other in tensors) for each in captured)
    assert all(a is b for a, b in zip(eager, make(), strict=True))
