"""Optimizer states in memory that can move: the same updates, and only on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.workers.training.conftest import make_spec
from workers.contracts.specs.run import RunSpec, spec_problems
from workers.contracts.specs.train import OptimizerSpec
from workers.contracts.specs.training_support import engine_problems
from workers.runtime.exit_codes import UserError
from workers.training.offload.paged import SMALLEST, UnifiedMemory, page_states
from workers.training.optim import build_optimizer, get_optimizer_state

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class HostPages:
    """Memory of this process, counted."""

    def __init__(self):
        self.taken = []

    def empty_like(self, tensor):
        self.taken.append(torch.empty_like(tensor))
        return self.taken[-1]


def steps(optimizer, parameters, device="cpu"):
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for each in parameters.values():
            each.grad = torch.randn(each.shape, generator=generator).to(device)
        optimizer.step()
    return [each.detach().cpu() for each in parameters.values()]


def parameters_of(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    shapes = {"blocks.0.attn.q.weight": (96, 128), "norm.weight": (128,)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "lion", "muon", "adafactor"])
def test_paged_states_give_the_same_updates(name):
    spec = OptimizerSpec.from_dict({"name": name, "lr": 0.01})
    plain, paged = parameters_of(), parameters_of()
    one, two = (
        build_optimizer(each, spec, shard_state=False, fused=False) for each in (plain, paged)
    )
    pages = HostPages()
    total = page_states(two, paged.values(), pages)
    assert total == sum(each.numel() * each.element_size() for each in pages.taken)
    assert all(each.numel() >= SMALLEST for each in pages.taken)
    assert all(torch.equal(a, b) for a, b in zip(plain.values(), paged.values(), strict=True))
    for ours, theirs in zip(steps(two, paged), steps(one, plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    held = {
        state.untyped_storage().data_ptr()
        for entry in get_optimizer_state(two).values()
        for state in entry.values()
        if isinstance(state, torch.Tensor)
    }
    assert {each.untyped_storage().data_ptr() for each in pages.taken} <= held


def test_a_cpu_is_refused_with_the_reason(train, tmp_path):
    optimizer = {"name": "adamw", "lr": 1e-3, "paged": True}
    [outcome] = train(make_spec(optimizer=optimizer), tmp_path).outcomes
    assert outcome["class"] == "user_error"
    assert "this device is a CPU, whose states are on the host already" in outcome["reason"]
    with pytest.raises(UserError, match="a GPU's memory"):
        UnifiedMemory(torch.device("cpu"))
    spec = {**make_spec(optimizer=optimizer), "resources": {"device": "cpu"}}
    [item] = spec_problems(RunSpec.from_dict(spec))
    assert item.field == "train.optimizer.paged"
    offloaded = make_spec(plan={"offload": "optimizer"}, optimizer=optimizer)
    [item] = engine_problems(RunSpec.from_dict(offloaded))
    assert item.message == "offload optimizer already keeps optimizer states off the device"


@GPU
def test_a_gpus_states_are_in_unified_memory():
    spec = OptimizerSpec.from_dict({"name": "adamw", "lr": 0.01})
    device = torch.device("cuda")
    plain, paged = parameters_of("cuda"), parameters_of("cuda")
    one, two = (
        build_optimizer(each, spec, shard_state=False, fused=False) for each in (plain, paged)
    )
    before = torch.cuda.memory_allocated()
    assert page_states(two, paged.values(), UnifiedMemory(device)) == 2 * 4 * 96 * 128
    assert torch.cuda.memory_allocated() - before < 4 * 96 * 128
    for ours, theirs in zip(steps(two, paged, "cuda"), steps(one, plain, "cuda"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
