"""Topics of the page of solved problems: a chart and numbers, each with its exact answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _

from webui.charts.panel import Level, Line, Panel
from webui.presentation.formatting import DASH
from workers.contracts.catalog import solved_problems as problems

_HUES = ("loss", "throughput", "grad", "mfu", "time-2")
DIGITS = 4


@dataclass(frozen=True, slots=True)
class Row:
    """A number that the run learns, and its exact answer."""

    name: str
    label: str
    exact: str
    learned: str


@dataclass(frozen=True, slots=True)
class Topic:
    """What one chart explains."""

    text: str
    panel: Panel
    rows: tuple[Row, ...]


def walk_topics(latest: Mapping[str, float]) -> list[Topic]:
    """Topics of the walk, with the newest numbers."""
    lam = problems.LAMBDA
    advantages = problems.walk_advantages(lam)
    return [
        _topic(
            _("Bellman values"),
            _(
                "A walk starts in state 3 of 5 and turns left or right by chance; the right end "
                "pays 1. The exact value of state k is k / 6. Values learn from the returns of GAE."
            ),
            [
                (f"walk/value/{state}", _("state %(k)s") % {"k": state}, value)
                for state, value in problems.walk_values().items()
            ],
            latest,
        ),
        _topic(
            _("Error of the values by λ"),
            _(
                "Root mean square of learned - exact. λ 0 trusts the values of the next state, "
                "λ 1 the walk's own reward: it has no bias and the largest noise."
            ),
            [(f"walk/error/{each:g}", f"λ {each:g}", 0.0) for each in problems.LAMBDAS],
            latest,
            zero=True,
            levels=False,
        ),
        _topic(
            _("Advantages with λ %(lam)s") % {"lam": f"{lam:g}"},
            _(
                "Of the walk from state 3 straight to the right end, by the learned values. The "
                "advantage of a step includes the temporal differences of the steps after it."
            ),
            [
                (f"walk/advantage/{state}", _("step from state %(k)s") % {"k": state}, value)
                for state, value in zip(problems.PATH, advantages, strict=True)
            ],
            latest,
        ),
        _topic(
            _("Advantage of the first step by λ"),
            _("A = (1 + λ + λ²) / 6: each of the three steps has the temporal difference 1/6."),
            [
                (f"walk/lambda/{each:g}", f"λ {each:g}", problems.walk_advantages(each)[0])
                for each in problems.LAMBDAS
            ],
            latest,
        ),
        _topic(
            _("PPO learns where to turn"),
            _(
                "With rewards discounted by 0.9 per step. The value model follows the exact value "
                "of the current policy, which a linear equation gives; the best policy always "
                "turns right and has the value 0.81 in state 3."
            ),
            [
                ("walk/policy/value", _("value model, state 3"), problems.best_walk_value()),
                ("walk/policy/bellman", _("exact value of the policy"), problems.best_walk_value()),
                ("walk/policy/right", _("mean probability of a right turn"), None),
            ],
            latest,
        ),
    ]


def bandit_topics(latest: Mapping[str, float]) -> list[Topic]:
    """Topics of the bandit, with the newest numbers."""
    best = problems.best_objective("k1_reward")
    sampled = {"reinforce": "REINFORCE", "baseline": _("with baseline"), "ppo": _("PPO, clipped")}
    penalties = {
        "k1_reward": _("k1 in the reward"),
        "k2_loss": _("k2 in the loss"),
        "k3_ratio_loss": _("k3 times ratio in the loss"),
        "k3_loss": _("k3 in the loss, original GRPO"),
    }
    gradients = {**sampled, "ratio": _("importance ratio, not clipped")}
    return [
        _topic(
            _("Objective by estimator of the penalty"),
            _(
                "Five arms with rewards 0, 0.2, 0.5, 1 and 0.8, and a penalty of 0.5 times the "
                "divergence from a reference. Updates use exact expectations, so only the "
                "estimator decides the result: k3 in the loss converges to a different policy."
            ),
            [
                (f"bandit/objective/{name}", penalties[name], problems.best_objective(name))
                for name in problems.KL_ESTIMATORS
            ],
            latest,
        ),
        _topic(
            _("Probabilities of the arms"),
            _("The optimum is the reference times exp(reward / 0.5), normalized."),
            [
                (f"bandit/arm/{arm}", _("arm %(k)s") % {"k": arm}, p)
                for arm, p in zip(problems.ARMS, problems.bandit_optimum(), strict=True)
            ],
            latest,
        ),
        _topic(
            _("Objective by gradient estimator, from samples"),
            _(
                "256 sampled arms per step. At the optimum all penalized rewards are equal: with a "
                "baseline the noise then vanishes; without one it remains."
            ),
            [(f"bandit/sampled/{name}", sampled[name], best) for name in sampled],
            latest,
        ),
        _topic(
            _("Estimates of one gradient"),
            _(
                "Mean over all samples so far of the gradient by the best arm. A baseline keeps "
                "the mean and reduces the spread; samples of an earlier policy need the ratio; "
                "clipping at 1.2 stops an arm that is already likelier."
            ),
            [
                (f"bandit/gradient/{name}", gradients[name], problems.gradient_moments(name)[0])
                for name in problems.GRADIENTS
            ],
            latest,
            more=[
                (
                    f"bandit/gradient_std/{name}",
                    _("%(name)s: spread") % {"name": gradients[name]},
                    problems.gradient_moments(name)[1],
                )
                for name in problems.GRADIENTS
            ],
        ),
        _topic(
            _("Estimates of the divergence"),
            _(
                "Samples come from the optimum. k1 and k3 have the exact mean, and k3 has a "
                "quarter of the spread; k2 is biased, but its gradient is exact."
            ),
            [
                (f"bandit/divergence/{name}", name, problems.divergence_moments(name)[0])
                for name in problems.DIVERGENCES
            ],
            latest,
            more=[
                (
                    f"bandit/divergence_std/{name}",
                    _("%(name)s: spread") % {"name": name},
                    problems.divergence_moments(name)[1],
                )
                for name in problems.DIVERGENCES
            ],
        ),
    ]


Numbers = Sequence[tuple[str, str, float | None]]


def _topic(
    title: str,
    text: str,
    numbers: Numbers,
    latest: Mapping[str, float],
    *,
    more: Numbers = (),
    zero: bool = False,
    levels: bool = True,
) -> Topic:
    """`numbers` are (metric, label, exact answer); `more` are listed without a curve."""
    lines = tuple(
        Line(name, label, hue) for (name, label, _exact), hue in zip(numbers, _HUES, strict=False)
    )
    across: dict[float, Level] = {}
    for (_name, _label, exact), hue in zip(numbers, _HUES, strict=False):
        if exact is not None and levels:
            across.setdefault(round(exact, 9), Level(_("exact"), hue, exact))
    panel = Panel(
        numbers[0][0].rpartition("/")[0].replace("/", "-"),
        title,
        "",
        lines,
        zero=zero,
        levels=tuple(across.values()),
    )
    rows = [_row(*each, latest) for each in (*numbers, *more)]
    return Topic(text, panel, tuple(rows))


def _row(name: str, label: str, exact: float | None, latest: Mapping[str, float]) -> Row:
    learned = latest.get(name)
    return Row(
        name,
        label,
        DASH if exact is None else f"{exact:.{DIGITS}f}",
        DASH if learned is None else f"{learned:.{DIGITS}f}",
    )
