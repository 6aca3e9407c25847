"""One fake rank: writes the files of the training engine, without computing anything.

Writes points, events and checkpoints, follows `control.json`, resumes, and exits with the
engine's codes. Writes each step also into a journal outside the run directory, which the
invariant checker reads. Standard library only, so it starts in 30 ms.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

STOPPED_CODE = 67  # `preempted` and `cancelled` of workers.runtime.exit_codes


def main() -> int:
    """Train to the last step or until a request; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    options = parser.parse_args()
    return Rank(json.loads(options.spec.read_bytes()), options.dir).run()


class Rank:
    """The state of one rank; `run` is its training loop."""

    def __init__(self, spec: dict, directory: Path) -> None:
        self.rank, self.directory = int(os.environ["RANK"]), directory
        self.steps = int(spec["train"]["steps"])
        self.every = int(spec["train"].get("checkpoint", {}).get("every_steps", 10))
        self.step_s = float(os.environ.get("CHAOS_STEP_S", "0.05"))
        # once this file exists, the remaining steps take no time
        self.hurry = Path(os.environ["CHAOS_JOURNAL"]) / "hurry"
        self.run_id, self.attempt = os.environ["ORRERY_RUN"], int(os.environ["ORRERY_ATTEMPT"])
        self.folder = directory / f"rank-{self.rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Path(os.environ["ORRERY_CHECKPOINTS"])
        name = f"{os.environ['ORRERY_FENCE']}-{self.rank}.jsonl"
        self.journal = Path(os.environ["CHAOS_JOURNAL"]) / name
        self.seq = {"points": 0, "events": 0}
        self.terminated = False
        self.control = 0

    def run(self) -> int:
        """Train; returns the exit code."""
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(self, "terminated", True))
        done = self._resume()
        self._write_journal("start", done)
        for step in range(done + 1, self.steps + 1):
            time.sleep(0.0 if self.hurry.exists() else self.step_s)
            self._point(step)
            self._write_journal("step", step)
            if step % self.every == 0:
                self._checkpoint(step)
            action = "preempt" if self.terminated else self._requested()
            if action is not None:
                if action in ("pause", "preempt"):
                    self._checkpoint(step)
                return self._exit("cancelled" if action == "stop" else "preempted", step)
        return self._exit("ok", self.steps)

    def _resume(self) -> int:
        folder = os.environ.get("ORRERY_RESUME")
        if not folder:
            return 0
        step = int(json.loads((Path(folder) / "state.json").read_text())["step"])
        self._event("checkpoint_restored", {"step": step, "path": folder})
        return step

    def _checkpoint(self, step: int) -> None:
        """Rank 0 of the first node writes; a complete folder appears atomically."""
        final = self.checkpoints / f"step-{step}"
        if self.rank != 0 or final.exists():
            return
        temporary = self.checkpoints / f".step-{step}-{self.attempt}-{os.getpid()}"
        temporary.mkdir(parents=True, exist_ok=True)
        (temporary / "state.json").write_text(json.dumps({"step": step, "attempt": self.attempt}))
        try:
            os.rename(temporary, final)
        except OSError:
            return
        data = {"step": step, "tokens": step, "path": str(final), "bytes": 40}
        self._event("checkpoint_saved", data)

    def _requested(self) -> "str | None":
        try:
            request = json.loads((self.directory / "control.json").read_bytes())
        except (OSError, ValueError):
            return None
        return request["action"] if request["action"] in ("stop", "pause", "preempt") else None

    def _point(self, step: int) -> None:
        row = self._head("points")
        row |= {"step": step, "tokens": step, "values": {"loss": 1.0 / step, "grad_norm": 1.0}}
        _append(self.folder / "points.jsonl", row)

    def _event(self, kind: str, data: dict) -> None:
        row = {**self._head("events"), "type": kind, "data": data}
        _append(self.folder / "events.jsonl", row)

    def _head(self, stream: str) -> dict:
        self.seq[stream] += 1
        head = {"run": self.run_id, "attempt": self.attempt, "rank": self.rank}
        return {**head, "seq": self.seq[stream], "time": time.time()}

    def _write_journal(self, kind: str, step: int) -> None:
        row = {"kind": kind, "time": time.time(), "step": step, "run": self.run_id}
        row |= {"attempt": self.attempt, "rank": self.rank, "pid": os.getpid()}
        row |= {"node": os.environ["ORRERY_NODE"], "local_rank": int(os.environ["LOCAL_RANK"])}
        _append(self.journal, row)

    def _exit(self, exit_class: str, step: int) -> int:
        self._write_journal("end", step)
        record = {"class": exit_class, "reason": f"ended after step {step}", "step": step}
        temporary = self.folder / ".exit.json"
        temporary.write_text(json.dumps(record))
        os.replace(temporary, self.folder / "exit.json")
        return 0 if exit_class == "ok" else STOPPED_CODE


def _append(path: Path, row: dict) -> None:
    line = json.dumps(row).encode() + b"\n"
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        if file.write(line) != len(line):  # the disk is full: remove the torn line
            os.ftruncate(file.fileno(), size)
            raise OSError(f"No space left on device: {path}")


if __name__ == "__main__":
    sys.exit(main())
