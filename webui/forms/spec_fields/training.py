"""Fields of training: steps, optimizer, validation and checkpoints."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import F, Section, same

TRAINING = Section(
    "train",
    _("Training"),
    _("Steps, optimizer, validation and checkpoints."),
    (
        F("train.steps", _("Steps"), "int"),
        F("train.seq_len", _("Sequence length"), "int", _("Tokens.")),
        F("train.optimizer.lr", _("Learning rate"), "float", default="0.001"),
        F(
            "train.lr_schedule.name",
            _("Schedule"),
            "choice",
            choices=same("constant", "cosine", "linear", "wsd"),
            default="constant",
        ),
        F("train.lr_schedule.warmup_steps", _("Warmup steps"), "int", default="0"),
        F(
            "train.eval.every_steps",
            _("Validate every"),
            "int",
            _("Steps. Leave empty to skip validation."),
            gates=True,
            default=_("never"),
        ),
        F(
            "train.checkpoint.every_steps",
            _("Checkpoint every"),
            "int",
            _("Steps. Leave empty to save none."),
            gates=True,
            default=_("never"),
        ),
        F("train.seed", _("Seed"), "int", default="0"),
    ),
    kinds=("train",),
    more_title=_("Optimizer, validation and checkpoint options"),
    more=(
        F(
            "train.optimizer.name",
            _("Optimizer"),
            "choice",
            choices=same("adamw", "adafactor", "lion", "muon", "sgd", "adamw8bit"),
            default="adamw",
        ),
        F("train.optimizer.betas", _("Betas"), "floats", default="0.9, 0.999"),
        F("train.optimizer.weight_decay", _("Weight decay"), "float", default="0.01"),
        F("train.clip_norm", _("Clip gradient norm at"), "float", default=_("never")),
        F("train.lr_schedule.min_lr", _("Final learning rate"), "float", default="0"),
        F("train.eval.batches", _("Validation batches"), "int", default="8"),
        F("train.checkpoint.keep", _("Checkpoints kept"), "int", default="3"),
        F(
            "train.samples.count",
            _("Samples per checkpoint"),
            "int",
            _("Texts generated from held-out prompts. Set 0 for none."),
            default="3",
        ),
        F("train.log_every", _("Log every"), "int", _("Steps."), default="1"),
        F(
            "train.allow_data_change",
            _("Continue on changed data"),
            "flag",
            _("Otherwise a checkpoint of other data is refused when the run resumes."),
        ),
        F(
            "train.fused_kernels",
            _("Fused kernels"),
            "choice",
            _("The run page shows the selected kernels."),
            choices=(("", _("if faster")), ("false", _("off: plain PyTorch"))),
        ),
        F("train.compile", _("torch.compile"), "flag"),
        F(
            "train.quantize_aware",
            _("Quantization-aware training"),
            "choice",
            _("Train with quantized weights to reduce the loss of later quantization."),
            choices=(("", _("no")), ("int8", "int8"), ("int4", _("int4, grouped"))),
            default="",
        ),
    ),
)
