"""Fields of the parallel plan."""

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
    ),
)
