"""Fields of the parallel plan, and of trials of plans before a run."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import ANSWERS, TRAINS, F, Section, same
from workers.contracts.specs.inference_support import REPLICATED, SHARDED

PLAN = Section(
    "plan",
    _("Plan"),
    _("Parallelism, batch size and precision."),
    (
        F(
            "plan",
            _("Plan"),
            "choice",
            choices=(("hand", _("manual")), ("auto", _("auto: chosen by the planner"))),
            default="hand",
            kinds=TRAINS,
        ),
        F("plan.dp", _("Data parallel (dp)"), "int", default="1", kinds=(*TRAINS, *REPLICATED)),
        F(
            "plan.zero",
            _("ZeRO stage"),
            "choice",
            _("0 replicates all, 1 shards optimizer states, 2 also gradients, 3 also weights."),
            choices=same("0", "1", "2", "3"),
            default="0",
            kinds=TRAINS,
        ),
        F(
            "plan.micro_batch_size",
            _("Micro-batch"),
            "int",
            _("Sequences per rank and micro-batch."),
            default="1",
            kinds=TRAINS,
        ),
        F(
            "plan.global_batch_size",
            _("Global batch"),
            "int",
            _("Sequences per step over all ranks."),
            default=_("micro-batch × dp"),
            kinds=TRAINS,
        ),
        F(
            "plan.precision",
            _("Precision"),
            "choice",
            choices=same("fp32", "bf16", "fp16", "fp8"),
            default="fp32",
        ),
    ),
    kinds=(*TRAINS, *ANSWERS),
    owns=("plan",),
    more_title=_("More parallelism and memory options"),
    more=(
        F("plan.tp", _("Tensor parallel (tp)"), "int", default="1", kinds=(*TRAINS, *SHARDED)),
        F(
            "plan.pp",
            _("Pipeline parallel (pp)"),
            "int",
            default="1",
            kinds=(*TRAINS, *SHARDED),
        ),
        F("plan.cp", _("Context parallel (cp)"), "int", default="1", kinds=TRAINS),
        F("plan.ep", _("Expert parallel (ep)"), "int", default="1", kinds=TRAINS),
        F(
            "plan.recompute",
            _("Recompute"),
            "choice",
            choices=same("none", "selective", "full", "auto"),
            default=_("none"),
            kinds=TRAINS,
        ),
        F(
            "plan.offload",
            _("Offload"),
            "choice",
            choices=same("none", "optimizer", "all", "nvme"),
            default=_("none"),
            kinds=TRAINS,
        ),
        F(
            "plan.schedule",
            _("Pipeline schedule"),
            "choice",
            choices=same(
                "naive",
                "gpipe",
                "1f1b",
                "interleaved_1f1b",
                "zb1p",
                "zbv",
                "dualpipev",
                "pipedream",
            ),
            default="1f1b",
            kinds=TRAINS,
        ),
        F(
            "plan.virtual_stages",
            _("Stages per device"),
            "int",
            _("At least 2 for interleaved schedules."),
            default=_("by schedule"),
            kinds=TRAINS,
        ),
        F("plan.sequence_parallel", _("Sequence parallel"), "flag", kinds=TRAINS),
        F(
            "plan.fp8_recipe",
            _("fp8 scales"),
            "choice",
            _(
                "block: per 128 numbers, as DeepSeek-V3. tensorwise and rowwise: torchao's layers, "
                "which also compile."
            ),
            choices=same("block", "tensorwise", "rowwise"),
            default=_("by compilation"),
            kinds=TRAINS,
        ),
        F(
            "plan.prefetch_layers",
            _("Layers gathered ahead"),
            "int",
            _("ZeRO 3 gathers this many layers before they are needed; 0 waits for each."),
            default="1",
            kinds=TRAINS,
        ),
        F(
            "plan.max_live_params",
            _("Gathered parameters"),
            "int",
            _(
                "ZeRO 3 keeps the last layers gathered from forward to backward pass while a rank "
                "has at most this many gathered parameters: less traffic, more memory."
            ),
            default=_("as few as possible"),
            kinds=TRAINS,
        ),
        F(
            "plan.param_persistence_threshold",
            _("Persistence threshold"),
            "int",
            _("ZeRO 3 keeps layers and tables with fewer parameters gathered until the update."),
            default="0",
            kinds=TRAINS,
        ),
        F(
            "plan.params_dtype",
            _("Stored weights"),
            "choice",
            _(
                "The precision's 16-bit type stores weights and gradients without fp32 copies: "
                "12 instead of 16 bytes per parameter. bf16 updates are rounded stochastically."
            ),
            choices=same("fp32", "bf16", "fp16"),
            default="fp32",
            kinds=TRAINS,
        ),
        F(
            "plan.grad_dtype",
            _("Stored gradients"),
            "choice",
            _("The same type as stored weights."),
            choices=same("fp32", "bf16", "fp16"),
            default=_("as stored weights"),
            kinds=TRAINS,
        ),
        F(
            "plan.reduce_dtype",
            _("Reduced gradients"),
            "choice",
            _("The type in which ranks sum gradients; fp32 is exact, 16 bits send half as much."),
            choices=same("fp32", "bf16", "fp16"),
            default=_("by precision"),
            kinds=TRAINS,
        ),
        F(
            "plan.dp_replicate",
            _("Replicas of shards"),
            "int",
            _(
                "Hybrid sharding: each of this many groups of data-parallel ranks holds a full "
                "copy of the shards, so gathers stay within a group. Must divide dp."
            ),
            default=_("one group"),
            kinds=TRAINS,
        ),
        F(
            "plan.stage_layers",
            _("Layers per stage"),
            "ints",
            _("One number per pipeline stage, such as 9, 9, 8; their sum is the model's layers."),
            default=_("even"),
            kinds=TRAINS,
        ),
        F(
            "plan.weight_stashing",
            _("Weight stashing"),
            "choice",
            _("PipeDream: forward and backward pass of a micro-batch use the same weights."),
            choices=(("", _("by schedule")), ("true", _("on")), ("false", _("off"))),
            kinds=TRAINS,
            when=("plan.schedule", ("pipedream",)),
        ),
        F(
            "plan.vertical_sync",
            _("Vertical sync"),
            "choice",
            _("PipeDream: all stages use one version of the weights for a micro-batch."),
            choices=(("", _("by schedule")), ("true", _("on")), ("false", _("off"))),
            kinds=TRAINS,
            when=("plan.schedule", ("pipedream",)),
        ),
        F(
            "plan.recompute_budget_bytes",
            _("Memory for activations"),
            "int",
            _("Bytes per rank; automatic recomputation stores activations up to this size."),
            default=_("what the device has left"),
            kinds=TRAINS,
            when=("plan.recompute", ("auto",)),
        ),
        F(
            "plan.loss_scale.initial",
            _("First loss scale"),
            "float",
            _("fp16 multiplies the loss by this factor, so that small gradients survive."),
            default="65536",
            kinds=TRAINS,
            when=("plan.precision", ("fp16",)),
        ),
        F(
            "plan.loss_scale.growth_interval",
            _("Steps before the scale grows"),
            "int",
            _("Consecutive steps without overflow."),
            default="2000",
            kinds=TRAINS,
            when=("plan.precision", ("fp16",)),
        ),
        F(
            "plan.loss_scale.growth",
            _("Growth of the scale"),
            "float",
            default="2",
            kinds=TRAINS,
            when=("plan.precision", ("fp16",)),
        ),
        F(
            "plan.loss_scale.backoff",
            _("Scale after an overflow"),
            "float",
            _("The scale is multiplied by this factor."),
            default="0.5",
            kinds=TRAINS,
            when=("plan.precision", ("fp16",)),
        ),
    ),
)

_AUTOMATIC = ("plan", ("auto",))

AUTOTUNE = Section(
    "autotune",
    _("Autotune"),
    _("Try the plans predicted fastest for a few steps, then train with the fastest one."),
    (
        F(
            "autotune.top_k",
            _("Plans to try"),
            "int",
            _("2 to 16. Empty: the plan predicted fastest runs without trials."),
            default=_("none"),
            gates=True,
            when=_AUTOMATIC,
        ),
        F(
            "autotune.steps",
            _("Steps per trial"),
            "int",
            _("Timed steps; clearly slower plans stop earlier."),
            default="12",
            when=_AUTOMATIC,
        ),
        F(
            "autotune.warmup_steps",
            _("Steps before timing"),
            "int",
            default="3",
            when=_AUTOMATIC,
        ),
        F(
            "autotune.max_share",
            _("Share of the run"),
            "float",
            _("All trials together take at most this share of the time of the run's steps."),
            default="0.05",
            when=_AUTOMATIC,
        ),
        F(
            "autotune.max_seconds",
            _("Time for trials"),
            "float",
            _("Seconds, of all trials together."),
            default=_("by the share"),
            when=_AUTOMATIC,
        ),
    ),
    kinds=("train",),
    owns=("autotune",),
)
