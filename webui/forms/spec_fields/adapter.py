"""Fields of adapters and frozen weights."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import F, Section
from workers.contracts.specs.finetuning.adapters import ALL_TARGETS, LOW_RANK

# adapters that the engine trains, with their labels
_ADAPTERS = (
    ("lora", "LoRA"),
    ("rslora", "rsLoRA"),
    ("dora", "DoRA"),
    ("qlora", "QLoRA"),
    ("ia3", "IA3"),
    ("bitfit", "BitFit"),
    ("adapter", _("bottleneck adapters")),
    ("prompt", _("prompt tuning")),
    ("p_tuning", "P-tuning"),
    ("prefix", _("prefix tuning")),
    ("p_tuning_v2", _("P-tuning v2")),
)

_METHOD = "train.adapter.method"
ANY = (_METHOD, tuple(name for name, _label in _ADAPTERS))
LOW = (_METHOD, LOW_RANK)
RANKED = (_METHOD, tuple(name for name in ANY[1] if name not in ("ia3", "bitfit")))
NONE = (_METHOD, ("",))

ADAPTER = Section(
    "adapter",
    _("Adapter"),
    _("Which parameters to train."),
    (
        F(
            "train.adapter.method",
            _("Adapter"),
            "choice",
            _("Trains few parameters next to frozen weights."),
            choices=(
                ("", _("none: train all weights")),
                *((name, label) for name, label in _ADAPTERS),
            ),
            gates=True,
        ),
        F(
            "train.adapter.rank",
            _("Rank"),
            "int",
            _("Rank of low-rank updates, units of a bottleneck, or number of virtual tokens."),
            default=_("16 for low-rank methods, 20 for others"),
            when=RANKED,
        ),
        F(
            "train.adapter.alpha",
            _("Alpha"),
            "float",
            _("Updates are scaled by alpha over the rank."),
            default=_("twice the rank"),
            when=LOW,
        ),
        F(
            "train.freeze",
            _("Frozen weights"),
            "words",
            _("Name patterns such as blocks.0.*"),
            default=_("none"),
            wide=True,
            when=NONE,
        ),
    ),
    kinds=("train",),
    more_title=_("Target layers and storage options"),
    more=(
        F(
            "train.adapter.targets",
            _("Target layers"),
            "words",
            _("Linear layers with low-rank updates."),
            choices=tuple((name, name) for name in ALL_TARGETS),
            default=_("all"),
            wide=True,
            when=LOW,
        ),
        F("train.adapter.dropout", _("Adapter dropout"), "float", default="0", when=ANY),
        F(
            "train.adapter.quantize",
            _("Frozen weights in 4 bits"),
            "choice",
            _("NF4; the default of QLoRA."),
            choices=(("", _("by method")), ("nf4", "nf4")),
            when=ANY,
        ),
        F(
            "train.adapter.modules_to_save",
            _("Modules trained in full"),
            "words",
            _("Such as head; stored with the adapter."),
            default=_("none"),
            when=ANY,
        ),
        F(
            "train.optimizer.paged",
            _("Paged optimizer states"),
            "flag",
            _("States move to the host when a GPU's memory is full."),
        ),
        F(
            "train.optimizer.lora_plus_ratio",
            _("LoRA+ ratio"),
            "float",
            _("Learning rate of the matrices B relative to the others."),
            default="1",
            when=LOW,
        ),
    ),
)
