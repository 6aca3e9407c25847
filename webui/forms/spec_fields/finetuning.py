"""Fields of the objective and its options."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import F, Section, same

SFT = ("train.objective", ("sft",))
DPO = ("train.objective", ("dpo",))
REWARD = ("train.objective", ("reward",))
DISTILL = ("train.objective", ("distill",))

FINETUNING = Section(
    "finetuning",
    _("Fine-tuning"),
    _("What the run minimizes, and the weights it starts from."),
    (
        F(
            "train.objective",
            _("Objective"),
            "choice",
            _("Fine-tuning trains on files of examples."),
            choices=(
                ("pretrain", _("next token")),
                ("sft", _("supervised fine-tuning")),
                ("dpo", _("preference optimization")),
                ("reward", _("reward model")),
                ("distill", _("distillation")),
                ("grpo", _("reinforcement learning (GRPO family)")),
                ("ppo", _("reinforcement learning (PPO with a value model)")),
            ),
            default="pretrain",
        ),
        F(
            "train.init_from",
            _("Start from weights"),
            "model",
            _("A checkpoint of a run, a folder or file of weights, or a package."),
            default=_("random weights"),
            double=True,
        ),
        F(
            "train.sft.train_on",
            _("Tokens with loss"),
            "choice",
            choices=(
                ("assistant", _("assistant")),
                ("completion", _("last answer")),
                ("all", _("all")),
            ),
            default="assistant",
            when=SFT,
        ),
        F(
            "train.sft.packing",
            _("Packing"),
            "choice",
            choices=(("", _("several per row")), ("false", _("one padded row each"))),
            when=SFT,
        ),
        F(
            "train.dpo.loss",
            _("Preference loss"),
            "choice",
            choices=same("dpo", "cdpo", "hinge", "ipo", "kto", "orpo", "simpo"),
            default="dpo",
            when=DPO,
        ),
        F("train.dpo.beta", _("Preference beta"), "float", default="0.1", when=DPO),
        F(
            "train.dpo.label_smoothing",
            _("Rate of wrong labels"),
            "float",
            default="0.1",
            when=("train.dpo.loss", ("cdpo",)),
        ),
        F(
            "train.dpo.gamma",
            _("Target margin"),
            "float",
            default="0.5",
            when=("train.dpo.loss", ("simpo",)),
        ),
        F(
            "train.dpo.desirable_weight",
            _("Weight of good answers"),
            "float",
            default="1",
            when=("train.dpo.loss", ("kto",)),
        ),
        F(
            "train.dpo.undesirable_weight",
            _("Weight of bad answers"),
            "float",
            default="1",
            when=("train.dpo.loss", ("kto",)),
        ),
        F(
            "train.dpo.reference",
            _("Reference"),
            "choice",
            _("What answers are compared with: by default the base of an adapter, else a copy."),
            choices=(
                ("", _("by method")),
                ("initial", _("a copy of the initial weights")),
                ("adapter_off", _("the model without its adapter")),
            ),
            default="",
            when=DPO,
        ),
        F(
            "train.reward.margin",
            _("Subtract margins"),
            "flag",
            _("Reward models: use each pair's margin field."),
            when=REWARD,
        ),
        F(
            "train.distill.teacher",
            _("Teacher"),
            "model",
            _("A folder or file of weights with the same tokenizer, or a package."),
            default=_("none"),
            double=True,
            when=DISTILL,
        ),
        F(
            "train.distill.loss",
            _("Divergence"),
            "choice",
            choices=(
                ("forward_kl", _("forward KL")),
                ("reverse_kl", _("reverse KL")),
                ("jsd", _("Jensen-Shannon")),
            ),
            default="forward_kl",
            when=DISTILL,
        ),
        F(
            "train.distill.beta",
            _("Weight of the teacher"),
            "float",
            default="0.5",
            when=("train.distill.loss", ("jsd",)),
        ),
        F(
            "train.distill.temperature",
            _("Distillation temperature"),
            "float",
            default="1",
            when=DISTILL,
        ),
        F(
            "train.distill.top_k",
            _("Tokens of the teacher"),
            "int",
            _(
                "Number of the teacher's most probable tokens to keep per position (forward KL "
                "only)."
            ),
            default=_("all"),
            when=("train.distill.loss", ("forward_kl",)),
        ),
        F(
            "train.distill.on_policy",
            _("On-policy share"),
            "float",
            _("Fraction of steps whose answers the student generates."),
            default="0",
            when=DISTILL,
        ),
        F(
            "train.distill.max_new_tokens",
            _("Longest answer of the student"),
            "int",
            _("Number of tokens."),
            default="128",
            when=DISTILL,
        ),
        F(
            "train.distill.sampling_temperature",
            _("Sampling temperature of the student"),
            "float",
            default="1",
            when=DISTILL,
        ),
        F(
            "train.distill.packing",
            _("Packing"),
            "choice",
            choices=(("", _("several per row")), ("false", _("one padded row each"))),
            when=DISTILL,
        ),
        F(
            "train.distill.train_on",
            _("Tokens with loss"),
            "choice",
            choices=(
                ("assistant", _("assistant")),
                ("completion", _("last answer")),
                ("all", _("all")),
            ),
            default="assistant",
            when=DISTILL,
        ),
    ),
    kinds=("train",),
)
