"""Charts of inference metrics."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.charts.panel import Line, Panel, single

FIRST_TOKEN = single(
    "ttft", _("Time to first token"), "s", "inference/ttft_s", _("time to first token"), "time"
)
TIME_PER_TOKEN = single(
    "tpot", _("Time per output token"), "s", "inference/tpot_s", _("per token"), "time-2"
)
SCORE_TIME = single(
    "score-time", _("Time per score"), "s", "inference/score_s", _("from request to score"), "time"
)
SCORES = single(
    "scores", _("Scores"), "scores/s", "inference/scores_per_s", _("scores/s"), "throughput"
)
HOST_TIME = single(
    "host-time", _("Host time per step"), "s", "inference/host_s", _("host"), "time-2"
)
SERVED = single(
    "served",
    _("Generated tokens"),
    "tokens/s",
    "inference/tokens_per_s",
    _("tokens/s"),
    "throughput",
)
REQUESTS = Panel(
    "requests",
    _("Requests"),
    "requests",
    (
        Line("inference/running", _("running"), "throughput"),
        Line("inference/waiting", _("waiting"), "event"),
    ),
    zero=True,
)
BLOCKS = single(
    "blocks",
    _("KV cache blocks used"),
    "blocks",
    "inference/kv_blocks_used",
    _("blocks"),
    "mem-kv_cache",
)

SHARES = Panel(
    "shares",
    _("Prefix cache hits and prefill share"),
    "fraction",
    (
        Line("inference/prefix_hit_rate", _("prefix cache hit rate"), "mfu"),
        Line("inference/prefill_share", _("prefill share of tokens"), "split-forward", "dash"),
    ),
    zero=True,
)
TOKENS = Panel(
    "tokens",
    _("Prompt and output tokens"),
    "tokens",
    (
        Line("inference/prompt_tokens", _("prompt"), "split-forward"),
        Line("inference/shared_tokens", _("cached prompt"), "mfu", "dash"),
        Line("inference/new_tokens", _("output"), "throughput"),
    ),
    zero=True,
)
PREEMPTED = single(
    "preempted",
    _("Preempted requests"),
    "requests",
    "inference/preemptions",
    _("requests"),
    "event",
)
SWAPPED = single(
    "swapped", _("Swapped KV cache blocks"), "blocks", "inference/swaps", _("blocks"), "time-2"
)
SPECULATION = single(
    "speculation",
    _("Tokens per step with speculation"),
    "tokens",
    "inference/accepted_per_step",
    _("tokens per step"),
    "throughput",
)
ACCEPTANCE = single(
    "acceptance",
    _("Draft tokens accepted"),
    "fraction",
    "inference/acceptance",
    _("accepted"),
    "mfu",
)
COMPLETED = single(
    "answered",
    _("Completed examples"),
    "answers",
    "inference/answered",
    _("examples"),
    "throughput",
)
