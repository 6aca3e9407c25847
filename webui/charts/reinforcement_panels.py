"""Charts of policy optimization: rewards, divergence, answers, and the sampler's mismatch."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from django.utils.translation import gettext_noop as _

from webui.charts.panel import Line, Panel, single
from workers.contracts.catalog.metrics import METRICS
from workers.contracts.catalog.ratio_bins import RATIO_BINS, RATIO_EDGES

_HUES = ("loss-2", "throughput", "time-2", "mfu", "grad", "event", "other-series")


def _bin_labels() -> list[str]:
    """Numbers only: they need no translation."""
    edges = [f"{edge:g}" for edge in RATIO_EDGES]
    inner = [f"{low} – {high}" for low, high in pairwise(edges)]
    return [f"< {edges[0]}", *inner, f"> {edges[-1]}"]


ENTROPY = single("entropy", _("Entropy"), "nats/token", "entropy", _("sampled tokens"), "loss")
CLIPPED = Panel(
    "clip_fraction",
    _("Clipped tokens"),
    "fraction",
    (
        Line("clip_fraction", _("without gradient"), "grad"),
        Line("mismatch/outside", _("trainer / sampler below 0.5 or above 2"), "fail"),
    ),
    zero=True,
)
RESPONSES = Panel(
    "response_tokens",
    _("Length of answers"),
    "tokens",
    (
        Line("response_tokens", _("mean"), "throughput"),
        Line("response_tokens/longest", _("longest"), "time-2", "dot"),
    ),
    zero=True,
)
GROUPS = Panel(
    "groups",
    _("Groups and cut answers"),
    "fraction",
    (
        Line("groups/equal", _("groups of equal reward"), "event"),
        Line("response_tokens/cut_fraction", _("answers without a stop token"), "time-2"),
    ),
    zero=True,
)
MISMATCH = Panel(
    "mismatch",
    _("Difference between sampler and trainer"),
    "nats/token",
    (Line("mismatch/kl", _("divergence"), "fail"),),
    zero=True,
)
RATIOS = single(
    "ratios",
    _("Importance ratio"),
    "",
    "mismatch/ratio",
    _("trainer / sampler"),
    "loss",
    zero=False,
)
STALENESS = Panel(
    "staleness",
    _("Age of the weights used for sampling"),
    "updates",
    (
        Line("staleness", _("mean over tokens"), "loss"),
        Line("staleness/longest", _("oldest token"), "event", "dot"),
    ),
    zero=True,
)
INTERRUPTED = single(
    "staleness_interrupted",
    _("Answers that new weights continued"),
    "fraction",
    "staleness/interrupted",
    _("sampled by more than one version"),
    "time-2",
)
VERSIONS = single(
    "staleness_versions",
    _("Weight versions per answer"),
    "versions",
    "staleness/versions",
    _("mean"),
    "loss-2",
)
_BIN_HUES = ("fail", "event", "time-2", "mfu", "throughput", "loss-2", "grad")
RATIO_HISTOGRAM = Panel(
    "ratio_histogram",
    _("Histogram of the importance ratio (policy / policy at the start of the iteration)"),
    "fraction",
    tuple(
        Line(name, label, hue)
        for name, label, hue in zip(RATIO_BINS, _bin_labels(), _BIN_HUES, strict=True)
    ),
    kind="stack",
    zero=True,
)
GROUP_REWARDS = Panel(
    "group_rewards",
    _("Rewards within groups"),
    "",
    (
        Line("groups/std", _("standard deviation"), "loss-2"),
        Line("groups/best", _("best answer"), "throughput"),
    ),
)
VALUE_LOSS = single("value_loss", _("Loss of the value model"), "", "value_loss", _("loss"), "loss")
VALUE_ERROR = Panel(
    "value_error",
    _("Values and returns"),
    "",
    (
        Line("value/error", _("error of values (root mean square)"), "fail"),
        Line("value/mean", _("mean value"), "loss"),
        Line("value/return", _("mean return"), "throughput", "dot"),
    ),
)
VALUE_EXPLAINED = single(
    "value_explained",
    _("Variance of returns that values explain"),
    "",
    "value/explained_variance",
    _("1: all, 0: none, below 0: worse than a constant"),
    "mfu",
    zero=True,
)
VALUE_CLIPPED = single(
    "value_clip_fraction",
    _("Values moved beyond the clip range"),
    "fraction",
    "value/clip_fraction",
    _("tokens"),
    "grad",
)
VALUE_GRADIENT = single(
    "value_grad_norm",
    _("Gradient norm of the value model"),
    "",
    "value/grad_norm",
    _("before clipping"),
    "grad",
)
PHASES = Panel(
    "policy_phases",
    _("Seconds of an update"),
    "s",
    (
        Line("generation_s", _("generation"), "split-forward"),
        Line("generation_wait_s", _("waiting for answers"), "split-other"),
        Line("sync_s", _("weight sync"), "split-exposed"),
        Line("scoring_s", _("scoring"), "split-data"),
        Line("update_s", _("update"), "split-backward"),
    ),
    zero=True,
)
VALUE = (VALUE_LOSS, VALUE_ERROR, VALUE_EXPLAINED, VALUE_CLIPPED, VALUE_GRADIENT)
PANELS = (
    ENTROPY,
    CLIPPED,
    RATIO_HISTOGRAM,
    *VALUE,
    RESPONSES,
    GROUPS,
    GROUP_REWARDS,
    MISMATCH,
    RATIOS,
    STALENESS,
    INTERRUPTED,
    VERSIONS,
    PHASES,
)
# drawn by `rewards`, or numbers that other charts explain
SHOWN = frozenset({"reward/mean", "reward/std", "reward/failed", "kl_coef"})


def is_policy(names: Collection[str]) -> bool:
    """Whether a run optimizes a policy by rewards."""
    return "reward/mean" in names


def rewards(names: Collection[str]) -> list[Panel]:
    """The mean reward with each component's mean; the spread has a chart of its own."""
    components = component_names(names)
    lines = tuple(
        Line(name, name.removeprefix("reward/"), _HUES[i % len(_HUES)], "dot")
        for i, name in enumerate(components)
    )
    mean = Line("reward/mean", _("weighted sum"), "loss")
    spread = single(
        "reward_spread", _("Spread of rewards"), "", "reward/std", _("standard deviation"), "loss-2"
    )
    return [Panel("rewards", _("Reward"), "", (mean, *lines), wide=True), spread]


def component_names(names: Collection[str]) -> list[str]:
    """The metrics of single rewards."""
    return sorted(name for name in names if name.startswith("reward/") and name not in METRICS)
