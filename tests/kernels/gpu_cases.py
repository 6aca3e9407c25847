"""Cases of a run without a GPU: correct, wrong, and cases that end or hang their process."""

from __future__ import annotations

import os
import time

import torch

from kernels.gpu.cases import Bench, Cases, Check, Compared, Work


def right(device: torch.device) -> list[Compared]:
    return [Compared("y", 1e-7, 1e-6)]


def wrong(device: torch.device) -> list[Compared]:
    return [Compared("y", 0.5, 1e-6), Compared("dx", float("nan"), 1e-6)]


def broken(device: torch.device) -> list[Compared]:
    raise RuntimeError("an illegal memory access")


def ends(device: torch.device) -> list[Compared]:
    os._exit(3)


def hangs(device: torch.device) -> list[Compared]:
    time.sleep(60)
    return []


def unmade(device: torch.device) -> Work:
    raise RuntimeError("too little memory")


CASES: Cases = [
    Check("op", "right", right),
    Check("op", "wrong", wrong),
    Check("op", "broken", broken),
    Check("op", "nothing", lambda device: []),
    Check("op", "ends", ends),
    Check("op", "after", right),
    Check("slow", "hangs", hangs),
    Check("slow", "after", right),
    Bench("op", "unmade", unmade),
]
