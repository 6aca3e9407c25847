"""Progress of this rank, readable while it hangs: a memory-mapped file and a thread with beats.

A mark costs about a microsecond. The layout is in `workers.contracts.wire.progress`.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from workers.contracts.wire.progress import BEACON, BEAT, BEAT_S, LAYOUT, PULSE, SIZE, VERSION

# between pulses; all ranks collect arrivals at the same even seconds of the clock
PULSE_S = 2.0
INFERENCE_GROUP = "inference"  # description of process groups of inference
# groups whose first rank has more work by design, so late arrivals are not meaningful
_UNEVEN = ("checkpoint", INFERENCE_GROUP)
_OWN = f"{os.sep}workers{os.sep}"


class Beacon:
    """Progress of the watched thread: the creating one, or the last that called `watch_me`.

    `step` is the last finished step, `micro_batch` counts within a step.
    """

    def __init__(self, folder: Path, *, stages: int = 1) -> None:
        self.phase = ""
        self.step = self.micro_batch = self.marks = 0
        self._folder, self._stages = folder, stages
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PULSE).unlink(missing_ok=True)
        with open(folder / BEACON, "wb+") as file:
            file.truncate(SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._beat()
        self.mark("starting")
        self._watched = threading.get_ident()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_closed, name="beacon", daemon=True)
        self._thread.start()

    def mark(self, phase: str, *, step: int | None = None) -> None:
        """Record that `phase` (at most 16 ASCII characters) begins, possibly again."""
        if step is not None and step != self.step:
            self.step, self.micro_batch = step, 0
        elif phase == "forward" and self.phase != "compile":  # compile is a part of a micro-batch
            self.micro_batch += 1
        self.phase = phase
        self.marks += 1
        now = time.monotonic_ns()
        record = LAYOUT.pack(
            VERSION, self.step, self.micro_batch, self.marks, now, phase.encode()[:16]
        )
        # `pack_into` writes zeros first, which a concurrent reader would see
        self._map[: LAYOUT.size] = record

    def watch_me(self) -> None:
        """Watch the calling thread from now on."""
        self._watched = threading.get_ident()

    def close(self) -> None:
        """Stop the thread; the file with the last mark remains."""
        self._closing.set()
        self._thread.join()
        self._map.close()

    def _beat(self) -> None:
        self._map[LAYOUT.size :] = BEAT.pack(time.monotonic_ns())

    def _beat_until_closed(self) -> None:
        due = time.time() // PULSE_S
        while not self._closing.wait(min(BEAT_S, PULSE_S - time.time() % PULSE_S + 0.001)):
            self._beat()
            if time.time() // PULSE_S > due:
                due = time.time() // PULSE_S
                self._pulse()

    def _pulse(self) -> None:
        groups = _groups()
        pulse = {
            "time": time.time(),
            "where": _source_line(self._watched),
            "calls": {
                name: group._get_sequence_number_for_group()
                for name, (group, _, _) in groups.items()
            },
            "arrivals": self._arrivals(groups),
        }
        temporary = self._folder / f".{PULSE}"
        try:
            temporary.write_text(json.dumps(pulse, separators=(",", ":")))
            os.replace(temporary, self._folder / PULSE)
        except OSError:
            return  # the recorder reports a full disk

    def _arrivals(self, groups: dict[str, Any]) -> list[tuple[str, int, int]]:
        """Arrival times of this rank at its newest collectives, from torch's flight recorder.

        Only of groups within one pipeline stage, because stages run one after the other, and not of
        groups whose first rank has more work.
        """
        if not groups:
            return []
        size = dist.get_world_size() // self._stages
        fair = {
            name.rpartition(":")[0]: name
            for name, (_, ranks, about) in groups.items()
            if about not in _UNEVEN and len({rank // size for rank in ranks}) == 1
        }
        return [
            (fair[entry["process_group"][0]], entry["collective_seq_id"], entry["time_created_ns"])
            for entry in _recorded()
            if not entry["is_p2p"] and entry["process_group"][0] in fair
        ]


def _recorded() -> list[dict[str, Any]]:
    """Entries of the flight recorders of gloo and NCCL."""
    from torch._C import _distributed_c10d as c10d

    entries = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get(
                "entries", []
            )
    return entries


def _groups() -> dict[str, tuple[Any, list[int], str]]:
    """Process groups of more than one rank: `{name and members: (group, ranks, description)}`."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    groups = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            groups[f"{name}:{zlib.crc32(str(ranks).encode()):08x}"] = (
                group,
                ranks,
                str(group.group_desc),
            )
    return groups


def _source_line(thread: int) -> str:
    """`loop.py:170 _gradients`: the innermost line of `workers` on that thread's stack."""
    frame = sys._current_frames().get(thread)
    innermost = frame
    while frame is not None and _OWN not in frame.f_code.co_filename:
        frame = frame.f_back
    frame = frame or innermost
    return (
        f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        if frame
        else ""
    )
