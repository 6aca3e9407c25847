"""Fields of reinforcement learning."""

from __future__ import annotations

from dataclasses import replace

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import F, Section

_SEPARATE = ("train.grpo.rollout.sync", ("separate",))
_SECTION = Section(
    "reinforcement",
    _("Reinforcement learning"),
    _("Answers to prompts are sampled, scored by rewards, and learned from."),
    (
        F(
            "train.grpo.rewards",
            _("Rewards"),
            "json",
            _(
                'A list, as [{"kind": "exact"}]; also number, regex, json_schema, tests, model, '
                "judge, python. A model or judge may be a serve run: "
                '{"kind": "model", "run": 12}.'
            ),
            default=_("required by the objective"),
            wide=True,
        ),
        F(
            "train.grpo.algorithm",
            _("Algorithm"),
            "choice",
            choices=(
                ("grpo", "GRPO"),
                ("dr_grpo", "Dr. GRPO"),
                ("dapo", "DAPO"),
                ("rloo", "RLOO"),
                ("reinforce_pp", "REINFORCE++"),
            ),
            default="grpo",
        ),
        F("train.grpo.group_size", _("Answers per prompt"), "int", default="8"),
        F(
            "train.grpo.prompts_per_step",
            _("Prompts per iteration"),
            "int",
            _("The batch is answers per prompt times this, divided by minibatches."),
            default="16",
        ),
        F(
            "train.grpo.rollout.max_new_tokens",
            _("Longest answer"),
            "int",
            _("Number of tokens."),
            default="128",
        ),
    ),
    kinds=("train",),
    more_title=_("Sampling, clipping and staleness options"),
    more=(
        F("train.grpo.rollout.temperature", _("Sampling temperature"), "float", default="1"),
        F("train.grpo.rollout.top_p", _("Sampling top-p"), "float", default="1"),
        F("train.grpo.kl.coef", _("Penalty coefficient"), "float", default="0"),
        F(
            "train.grpo.kl.estimator",
            _("Penalty estimator"),
            "choice",
            _("Estimator of the KL divergence from the initial weights."),
            choices=(
                ("k2_loss", _("k2 in the loss")),
                ("k3_ratio_loss", _("k3 times the ratio in the loss")),
                ("k1_reward", _("k1 in the reward")),
                ("k3_loss", _("k3 in the loss (original GRPO)")),
            ),
            default="k2_loss",
        ),
        F(
            "train.grpo.kl.target",
            _("Target divergence"),
            "float",
            _("Adapts the coefficient; in nats per token."),
            default=_("none"),
        ),
        F("train.grpo.clip.low", _("Clip below"), "float", default="0.2"),
        F("train.grpo.clip.high", _("Clip above"), "float", default="0.2"),
        F("train.grpo.minibatches", _("Minibatches"), "int", default="1"),
        F("train.grpo.epochs", _("Epochs over an iteration"), "int", default="1"),
        F(
            "train.grpo.rollout.sync",
            _("Where answers are sampled"),
            "choice",
            choices=(
                ("colocated", _("on the training devices, in turn")),
                ("separate", _("on devices of their own")),
            ),
            default="colocated",
        ),
        F(
            "train.grpo.rollout.devices",
            _("Devices for sampling"),
            "int",
            _("Devices in addition to the plan's. auto: the planner splits the run's devices."),
            default="1",
            when=_SEPARATE,
        ),
        F(
            "train.grpo.staleness.max",
            _("Oldest weights of an answer"),
            "int",
            _(
                "Number of updates; 0 samples every answer with the newest weights, and training "
                "waits."
            ),
            default="0",
            when=_SEPARATE,
        ),
        F(
            "train.grpo.staleness.correction",
            _("Correction of older weights and the sampler's mismatch"),
            "choice",
            choices=(
                ("none", _("none")),
                ("truncated", _("truncated importance weights")),
                ("decoupled", _("decoupled loss")),
            ),
            default="none",
        ),
        F(
            "train.grpo.on_reward_error",
            _("If a reward fails"),
            "choice",
            choices=(("fail", _("end the run")), ("skip", _("leave the answer out"))),
            default="fail",
        ),
    ),
)

_GRPO = ("train.objective", ("grpo",))
_PPO = ("train.objective", ("ppo",))
# fields of the GRPO family that PPO does not have
_GRPO_ONLY = ("train.grpo.algorithm",)
# defaults of PPO that differ from those of the same field of GRPO
_PPO_DEFAULTS = {
    "train.ppo.group_size": "1",
    "train.ppo.prompts_per_step": _("as many as fill the batch"),
    "train.ppo.kl.coef": "0.05",
    "train.ppo.kl.estimator": "k1_reward",
}
_VALUE_MODEL = (
    F(
        "train.ppo.value.init_from",
        _("Value model starts from"),
        "model",
        _("A reward model, or other weights of the policy's shape."),
        default=_("the policy's initial weights"),
        double=True,
    ),
    F(
        "train.ppo.value.lr",
        _("Learning rate of the value model"),
        "float",
        default=_("the policy's"),
    ),
    F("train.ppo.value.coef", _("Factor of the value loss"), "float", default="0.5"),
    F(
        "train.ppo.clip.value",
        _("Clip values by"),
        "float",
        _("Clip range: the largest change of a value relative to the start of the iteration."),
        default="0.2",
    ),
    F("train.ppo.gae.gamma", _("Discount (gamma)"), "float", default="1"),
    F(
        "train.ppo.gae.lam",
        _("Weight of later advantages (lambda)"),
        "float",
        _("λ of generalized advantage estimation: 1 has no bias, 0 has the least variance."),
        default="0.95",
    ),
)


def _moved(path: str) -> str:
    return path.replace("train.grpo.", "train.ppo.")


def _of_ppo(fields: tuple[F, ...]) -> tuple[F, ...]:
    """The same fields of PPO, with its defaults."""
    moved = (
        replace(
            field,
            path=_moved(field.path),
            when=_PPO if field.when is None else (_moved(field.when[0]), field.when[1]),
        )
        for field in fields
        if field.path not in _GRPO_ONLY
    )
    return tuple(
        replace(field, default=_PPO_DEFAULTS.get(field.path, field.default)) for field in moved
    )


REINFORCEMENT = replace(
    _SECTION,
    fields=(
        *(replace(field, when=field.when or _GRPO) for field in _SECTION.fields),
        *_of_ppo(_SECTION.fields),
        *(replace(field, when=_PPO) for field in _VALUE_MODEL[:2]),
    ),
    more=(
        *(replace(field, when=field.when or _GRPO) for field in _SECTION.more),
        *_of_ppo(_SECTION.more),
        *(replace(field, when=_PPO) for field in _VALUE_MODEL[2:]),
    ),
)
