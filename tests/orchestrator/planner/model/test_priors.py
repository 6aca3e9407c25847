"""Offsets of datasheets and kernel papers, and the peers that bound a device."""

import math

import pytest

from orchestrator.planner.model.parameters import PARAMETERS
from orchestrator.planner.model.priors import PUBLISHED, best_mfu_of, offsets
from workers.contracts.catalog.devices import DEVICES


def test_a_device_with_less_power_does_not_bound_one_with_more():
    weak, strong = DEVICES["h100-96g"], DEVICES["h100-80g"]
    peers = {"h100-96g half": 0.33, "a100-80g half": 0.6}
    assert best_mfu_of(peers, strong, "bf16") == math.inf
    assert best_mfu_of(peers, weak, "bf16") == 0.33
    assert best_mfu_of({**peers, "h100-80g half": 0.46}, weak, "bf16") == 0.46
    assert best_mfu_of(peers, weak, "fp8") == math.inf


def test_attention_has_the_efficiency_of_its_published_kernel():
    default = PARAMETERS["attention_efficiency"].default
    for framework, device, share in (
        ("fsdp2", "a100-80g", 0.55),
        ("fsdp2", "h100-80g", 0.35),
        ("megatron", "b200-192g", 0.5),
    ):
        offset = offsets(framework, DEVICES[device])["attention_efficiency"]
        assert default * math.exp(offset) == pytest.approx(share, rel=0.02)
    # the same kernel at 500 W
    less = offsets("fsdp2", DEVICES["h100-96g"])["attention_efficiency"]
    assert less < offsets("fsdp2", DEVICES["h100-80g"])["attention_efficiency"]


def test_products_need_as_many_tokens_as_the_device_computes_flops_per_byte():
    assert offsets("orrery", DEVICES["a100-80g"])["gemm_half_tokens"] == pytest.approx(0, abs=0.01)
    h100 = DEVICES["h100-80g"]
    ratio = h100.peak("bf16") / h100.memory_gb_per_s / (312 / 2039)
    assert offsets("orrery", h100)["gemm_half_tokens"] == pytest.approx(math.log(ratio))


def test_a_fitted_effect_adds_to_the_offsets():
    h100 = DEVICES["h100-80g"]
    values = PUBLISHED.values("fsdp2", h100)
    common = PUBLISHED.units["common"]["attention_efficiency"]
    known = offsets("fsdp2", h100)["attention_efficiency"]
    fitted = sum(
        PUBLISHED.units.get(unit, {}).get("attention_efficiency", 0.0)
        for unit in ("generation:hopper", "framework:fsdp2", "pair:fsdp2/hopper")
    )
    assert math.log(values["attention_efficiency"]) == pytest.approx(common + known + fitted)


def test_a_cpu_has_no_offsets():
    assert offsets("orrery", DEVICES["cpu"]) == {}
