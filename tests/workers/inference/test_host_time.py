"""Host time of a step leaves out the device's work, also where the host computes."""

from __future__ import annotations

import time

import pytest
import torch

from workers.inference.host_time import HostTime


@pytest.mark.parametrize(("device", "host_s"), [("cpu", 3.0), ("cuda", 5.0)])
def test_host_time(device: str, host_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    host_time = HostTime(torch.device(device))
    for _ in range(2):
        with host_time.step():
            now[0] += 1.0  # scheduling
            with host_time.launches():
                now[0] += 1.0  # on a GPU the host only launches the model
            with host_time.device_work():
                now[0] += 4.0
            now[0] += 0.5
        now[0] += 100.0  # between steps
    assert host_time.seconds == host_s
