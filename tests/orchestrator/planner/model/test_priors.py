"""Offsets of datasheets and kernel papers, and the peers that bound a device."""

import math

import pytest

from orchestrator.planner.model.frameworks import FRAMEWORKS
from orchestrator.planner.model.parameters import PARAMETERS, defaults
from orchestrator.planner.model.prior_values import PEERS
from orchestrator.planner.model.priors import (
    LARGEST_GEMM_SHARE,
    PUBLISHED,
    best_mfu_of,
    best_peer_mfu,
    offsets,
    power_density,
    unmeasured_error,
)
from orchestrator.planner.model.profiles import published
from tests.orchestrator.planner.predicted import predicted
from workers.contracts.catalog.devices import DEVICES


def test_a_device_with_less_power_does_not_bound_one_with_more():
    weak, strong = DEVICES["h100-96g"], DEVICES["h100-80g"]
    peers = {"h100-96g half": 0.33, "a100-80g half": 0.6}
    assert best_mfu_of(peers, strong, "bf16") == 0.6  # of all devices
    assert best_mfu_of(peers, weak, "bf16") == 0.33
    assert best_mfu_of({**peers, "h100-80g half": 0.46}, weak, "bf16") == 0.46
    assert best_mfu_of(peers, weak, "fp8") == math.inf


def test_a_gb200_is_bounded_by_a_b200_of_the_same_silicon():
    peers = {"b200-192g half": 0.57, "a100-80g half": 0.64}
    assert best_mfu_of(peers, DEVICES["gb200-192g"], "bf16") == 0.57


def test_a_gpu_without_peers_is_bounded_by_the_best_of_all():
    for name in ("h20-96g", "v100-32g", "mi300x-192g", "rtx4090-24g"):
        precision = "bf16" if DEVICES[name].supports("bf16") else "fp16"
        assert best_peer_mfu(DEVICES[name], precision) == max(
            value for key, value in PEERS.items() if key.endswith(" half")
        )
    assert best_peer_mfu(DEVICES["cpu"], "bf16") == math.inf


GPUS = [device for device in DEVICES.values() if device.kind == "gpu"]


@pytest.mark.parametrize("device", GPUS, ids=[device.name for device in GPUS])
@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_no_prediction_exceeds_what_published_runs_reached(device, framework):
    """Products below the datasheet's peak; MFU at most that of the best published run."""
    values = defaults(framework, device)
    for name, each in PARAMETERS.items():
        assert each.low <= values[name] <= each.high, name
    measured = published(framework, device) is not None
    if not measured:
        assert values["gemm_efficiency"] <= LARGEST_GEMM_SHARE
    precision = "bf16" if device.supports("bf16") else "fp16"
    most = max(value for key, value in PEERS.items() if key.endswith(" half"))
    for model, batch in (("llama3-8b", 2), ("llama2-70b", 16)):
        table = predicted(
            model,
            {
                "dp": 8,
                "zero": 3,
                "precision": precision,
                "micro_batch_size": batch,
                "global_batch_size": 8 * batch,
            },
            device=device.name,
            seq_len=8192,
            using=framework,
        )
        peak = device.peak(precision) * 1e12
        assert (table["gemm_rate"] < peak).all()
        assert table["mfu"][0] <= most
        assert table["hfu"][0] <= 0.75


def test_the_power_trend_is_not_extrapolated():
    h20, a100 = DEVICES["h20-96g"], DEVICES["a100-80g"]
    assert h20.peak("bf16") / h20.power_w < a100.peak("bf16") / a100.power_w
    assert power_density(h20) == power_density(a100)
    strongest = h20.model_copy(update={"peak_tflops": {"bf16": 9000.0}})
    assert power_density(strongest) == power_density(DEVICES["b200-192g"])
    assert unmeasured_error("megatron", h20) > unmeasured_error("megatron", DEVICES["h200-141g"])


def test_volta_keeps_a_width_of_its_own():
    """The general default is an A100's; no run of Volta supports it."""
    assert defaults("megatron", DEVICES["v100-32g"])["gemm_half_width"] == 300


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
