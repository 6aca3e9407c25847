"""Charts of produce runs: lines, candidates by filter, tokens and cost."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.charts.panel import Line, Panel

PRODUCED = Panel(
    "produced",
    _("Lines"),
    "lines",
    (
        Line("produce/accepted", _("accepted"), "throughput"),
        Line("produce/rejected", _("rejected"), "event"),
    ),
    zero=True,
)
PRODUCE_SPEED = Panel(
    "produce_speed",
    _("Lines per second"),
    "lines/s",
    (Line("produce/lines_per_s", _("lines/s"), "throughput"),),
    zero=True,
)
PRODUCE_RATE = Panel(
    "produce_rate",
    _("Generated tokens"),
    "tokens/s",
    (Line("produce/tokens_per_s", _("tokens/s"), "throughput"),),
    zero=True,
)
PRODUCE_TOKENS = Panel(
    "produce_tokens",
    _("Prompt and output tokens"),
    "tokens",
    (
        Line("produce/prompt_tokens", _("prompt"), "time"),
        Line("produce/completion_tokens", _("output"), "throughput"),
    ),
    zero=True,
)
PRODUCE_COST = Panel(
    "produce_cost",
    _("Cost"),
    "USD",
    (Line("produce/cost_usd", _("cost"), "event"),),
    zero=True,
)
PRODUCE: tuple[Panel, ...] = (
    PRODUCED,
    PRODUCE_SPEED,
    PRODUCE_RATE,
    PRODUCE_TOKENS,
    PRODUCE_COST,
)
