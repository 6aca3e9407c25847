"""No tensor is read by the host in the passes of a model as a GPU runs it.

Fake tensors have no values: reading one raises an error. Copies to the host are refused by a mode.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.moe import grouped, permute
from tests.workers.training.conftest import TINY
from workers.contracts.specs.model import ModelSpec
from workers.models.decoder import Decoder
from workers.models.layers import operations

MOE = {"experts": 4, "top_k": 2, "expert_ffn": 32, "aux_loss": 0.01}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "routed": {"moe": MOE},
    "routed with a capacity": {"moe": {**MOE, "capacity": 1.25, "shared_experts": 1}},
}


class NoReads(TorchDispatchMode):
    """Refuses operators whose result the host waits for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert name not in (
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::masked_select",
            "aten::bincount",
            "aten::equal",
        ), f"{name} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are permuted and multiplied as on a GPU, by torch's operators."""
    use_torch = operations._use_torch
    routed = ("moe_permute", "grouped_matmul")
    monkeypatch.setattr(
        operations, "_use_torch", lambda op, *given: op not in routed and use_torch(op, *given)
    )
    monkeypatch.setattr(permute, "_use_own", lambda *given: False)
    monkeypatch.setattr(grouped, "_torch_why_not", lambda x, w: None)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refused(name))


def refused(name: str) -> Any:
    def refuse(self: torch.Tensor, *given: Any, **options: Any) -> Any:
        raise AssertionError(f"the host read a tensor by {name}")

    return refuse


def in_bf16(spec: ModelSpec) -> Decoder:
    """Built in bf16: modules of fake tensors cannot be cast."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Decoder(spec).train()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_passes_of_a_model(name: str, device_path: None) -> None:
    spec = ModelSpec.from_dict({**TINY, **MODELS[name]})
    with FakeTensorMode():
        decoder = in_bf16(spec)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        with NoReads():
            decoder(tokens).float().logsumexp(-1).sum().backward()
    assert all(each.grad is not None for each in decoder.parameters())


def test_reads_raise_an_error(device_path: None) -> None:
    """The same with the exchange of a CPU: one product per expert."""
    with FakeTensorMode(), pytest.raises(AssertionError, match=r"tolist|bincount"):
        decoder = in_bf16(ModelSpec.from_dict({**TINY, "moe": MOE}))
        operations.make_plain(decoder)
        with NoReads():
            decoder(torch.zeros(2, 16, dtype=torch.int64))
