"""Bytes held, speeds and peaks are what their definitions say."""

from __future__ import annotations

import pytest
import torch

from workers.metrics.memory import (
    SavedForBackward,
    capacity_bytes,
    held_bytes,
    process_memory,
    storage_keys,
)
from workers.metrics.peak import device_peak
from workers.metrics.throughput import Throughput

CPU = torch.device("cpu")


def test_held_bytes_counts_each_storage_once():
    whole = torch.zeros(100)
    assert held_bytes([whole, whole[:50], whole.view(10, 10)]) == 400
    assert held_bytes([whole, torch.zeros(2)], without=storage_keys([whole])) == 8


def test_saved_for_backward_counts_activations_without_weights():
    weight = torch.nn.Parameter(torch.randn(64, 32))
    x = torch.randn(8, 64)
    with SavedForBackward() as saved:
        y = torch.relu(x @ weight)
        y.sum()
    assert saved.held(without=storage_keys([weight])) == held_bytes([x, y])


def test_a_process_holds_what_it_allocates():
    before, _ = process_memory(CPU)
    block = torch.ones(20_000_000)
    allocated, reserved = process_memory(CPU)
    assert allocated - before == pytest.approx(held_bytes([block]), rel=0.1)
    assert reserved >= allocated
    assert capacity_bytes(CPU, local_world_size=2) == pytest.approx(
        capacity_bytes(CPU, local_world_size=1) / 2, abs=1
    )


def test_a_peak_counts_since_the_last_call():
    process_memory(CPU)
    torch.ones(20_000_000).sum()  # freed again
    peak, largest = process_memory(CPU)
    now, still = process_memory(CPU)
    assert peak - now == pytest.approx(80_000_000, rel=0.2)
    assert still >= largest >= peak


def test_a_slot_limits_the_capacity(monkeypatch):
    whole = capacity_bytes(CPU, local_world_size=1)
    monkeypatch.setenv("ORRERY_SLOT_BYTES", str(2**20))
    assert capacity_bytes(CPU, local_world_size=2) == 2**20
    monkeypatch.setenv("ORRERY_SLOT_BYTES", str(4 * whole))
    assert capacity_bytes(CPU, local_world_size=1) == whole


def test_throughput_of_the_logged_window():
    speed = Throughput(flops_per_token=6e6, peak_flops=1e10, devices=2, hardware_factor=4 / 3)
    speed.step(seconds=0.5, tokens=1000)
    speed.step(seconds=1.5, tokens=1000)
    values = speed.values()
    assert values["tokens_per_s"] == 1000
    assert values["step_time_s"] == 1.0
    assert values["tflops_per_device"] == pytest.approx(0.003)
    assert values["mfu"] == pytest.approx(0.3)
    assert values["hfu"] == pytest.approx(0.4)
    speed.step(seconds=1.0, tokens=10)
    assert speed.values()["tokens_per_s"] == 10, "a new window"


def test_the_head_counts_for_positions_with_logits():
    speed = Throughput(flops_per_token=6e6, peak_flops=1e10, devices=1, head_flops_per_token=2e6)
    speed.step(seconds=1.0, tokens=1000, with_logits=250)
    speed.step(seconds=1.0, tokens=1000)
    assert speed.values()["mfu"] == pytest.approx((12e9 - 750 * 2e6) / 2e10)
    # a rounded or padded sequence has more positions than tokens
    speed.step(seconds=1.0, tokens=1000, with_logits=1008)
    assert speed.values()["mfu"] == pytest.approx(0.6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpu_peak_is_measured(precision):
    peak = device_peak(CPU, precision, budget_s=0.02)
    assert peak.measured
    assert peak.device == "cpu"
    assert peak.flops > 1e8
