"""Two displays of a watched run: a live one for terminals, and lines for files and pipes."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from orrery_cli.output import clock_time, duration, number, sparkline

_LINE_EVERY_S = 10.0


def headline(run: dict[str, Any], may_start: str | None = None) -> str:
    """What the run does now, in one line: step and numbers, or why it waits."""
    state, summary = run["state"], run["summary"]
    parts = []
    if state == "queued":
        parts.append(run["wait_reason"] or "waits for the scheduler")
        if may_start:
            parts.append(f"may start at {clock_time(may_start)}")
    elif state == "paused":
        parts.append(f"`orrery resume {run['id']}` continues it")
    elastic = run.get("elastic")
    if elastic and elastic["devices"] and state != "queued":
        least, most = elastic["min_devices"], elastic["max_devices"]
        parts.append(f"{elastic['devices']} devices of {least}-{most}")
    if summary.get("step") is not None and state != "queued":
        steps = f"/{summary['steps']}" if summary.get("steps") else ""
        parts.append(f"step {summary['step']}{steps}")
    if state in ("running", "stopping", "finished"):
        for name, label in (("loss", "loss"), ("tokens_per_s", "tokens/s")):
            if summary.get(name) is not None:
                parts.append(f"{label} {number(summary[name])}")
        if summary.get("mfu") is not None:
            parts.append(f"MFU {100 * float(summary['mfu']):.1f}%")
        if state == "running" and summary.get("eta_s") is not None:
            parts.append(f"{duration(summary['eta_s'])} left")
    return f"{state}: {', '.join(parts)}" if parts else str(state)


def end_lines(run: dict[str, Any], losses: list[Any]) -> list[str]:
    """How the run ended, with its reason and where to look."""
    lines = [f"run {run['id']} {headline(run)}"]
    if losses:
        lines.append(f"loss {sparkline(losses)} {number(losses[0])} → {number(losses[-1])}")
    if run["state"] == "failed":
        exit_ = run["exit"] or {}
        lines.append(f"{exit_.get('class', 'failed')}: {exit_.get('reason', '')}")
        lines.append(f"its output: orrery logs {run['id']}")
    return lines


class Lines:
    """A line per change of state or reason, and every ten seconds while the run trains."""

    draws_losses = False

    def __init__(self, *, silent: bool) -> None:
        self.silent = silent
        self._last: tuple[Any, ...] = ()
        self._at = 0.0
        self._outage = False

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        return

    def update(self, run: dict[str, Any], losses: list[Any], may_start: str | None) -> None:
        """Print what is new; `ended` prints the end."""
        if run["ended"]:
            return
        now = time.monotonic()
        step = run["summary"].get("step")
        key = (run["state"], run["wait_reason"], run["attempt"])
        if key == self._last[:3] and (now - self._at < _LINE_EVERY_S or self._last[3:] == (step,)):
            return
        self._last, self._at = (*key, step), now
        self._print(headline(run, may_start))

    def outage(self, reason: str, left_s: float) -> None:
        """Report once that the server does not answer."""
        if not self._outage:
            print(
                f"{reason}; trying again for {duration(left_s)}; the run continues",
                file=sys.stderr,
                flush=True,
            )
        self._outage = True

    def outage_ended(self) -> None:
        """Report that the server answers again."""
        self._outage = False
        print("the server answers again", file=sys.stderr, flush=True)

    def ended(self, run: dict[str, Any], losses: list[Any]) -> None:
        """Print how the run ended."""
        if not self.silent:
            print("\n".join(end_lines(run, losses)), flush=True)

    def _print(self, text: str) -> None:
        if not self.silent:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Screen:
    """A progress bar with the loss as sparkline, redrawn in place."""

    draws_losses = True

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._run: dict[str, Any] | None = None
        self._view: tuple[list[Any], str | None] = ([], None)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._live.stop()

    def update(self, run: dict[str, Any], losses: list[Any], may_start: str | None) -> None:
        """Redraw."""
        self._run, self._view = run, (losses, may_start)
        self._draw("")

    def outage(self, reason: str, left_s: float) -> None:
        """Show under the last state that the server does not answer."""
        self._draw(f"{reason}; trying again for {duration(left_s)}; the run continues")

    def outage_ended(self) -> None:
        """The next update removes the message."""

    def ended(self, run: dict[str, Any], losses: list[Any]) -> None:
        """Leave how the run ended on the screen."""
        self._live.stop()
        for line in end_lines(run, losses):
            self._console.print(line, markup=False)

    def _draw(self, warning: str) -> None:
        from rich.console import Group, RenderableType
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        parts: list[RenderableType] = []
        if self._run is not None:
            run, (losses, may_start) = self._run, self._view
            parts.append(Text(f"run {run['id']} {run['name']}", style="bold"))
            parts.append(Text(headline(run, may_start)))
            summary = run["summary"]
            if summary.get("steps") and run["state"] != "queued":
                width = min(60, max(10, self._console.width - 2))
                bar = ProgressBar(summary["steps"], summary.get("step") or 0, width=width)
                parts.append(bar)
            if losses:
                ends = f" {number(losses[0])} → {number(losses[-1])}"
                parts.append(Text("loss ") + Text(sparkline(losses), style="blue") + Text(ends))
        if warning:
            parts.append(Text(warning, style="yellow"))
        self._live.update(Group(*parts), refresh=True)
