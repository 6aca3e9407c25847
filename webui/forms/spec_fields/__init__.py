"""Fields of a run's spec in the new-run form: one table for the server and `new_run.js`.

Each section has its module. Validation is in the contracts. Texts are marked here and translated
by the view.
"""

from __future__ import annotations

from collections.abc import Mapping

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.adapter import ADAPTER
from webui.forms.spec_fields.benchmark import BENCHMARK
from webui.forms.spec_fields.data import DATA
from webui.forms.spec_fields.evaluation import EVALUATION
from webui.forms.spec_fields.field import (
    ANSWERS,
    CUSTOM_MODEL,
    DATA_SET,
    MODEL_OF_WEIGHTS,
    OWN_FILE,
    OWN_JSON,
    OWN_PATH,
    SMOLLM2,
    TRAINS,
    F,
    Section,
    SpecField,
)
from webui.forms.spec_fields.finetuning import FINETUNING
from webui.forms.spec_fields.inference import EVALUATE, GENERATE, SERVE
from webui.forms.spec_fields.model import MODEL, WEIGHTS
from webui.forms.spec_fields.plan import AUTOTUNE, PLAN
from webui.forms.spec_fields.produce import PRODUCE
from webui.forms.spec_fields.reinforcement import REINFORCEMENT
from webui.forms.spec_fields.resources import NOTES, RESOURCES
from webui.forms.spec_fields.script import SCRIPT
from webui.forms.spec_fields.training import TRAINING

__all__ = [
    "ANSWERS",
    "BODIES",
    "CUSTOM_MODEL",
    "DATA_SET",
    "FIELDS",
    "KIND",
    "MODEL_OF_WEIGHTS",
    "OWN_FILE",
    "OWN_JSON",
    "OWN_PATH",
    "SECTIONS",
    "SMOLLM2",
    "TRAINS",
    "Section",
    "SpecField",
    "exists",
    "sections_of",
]

KIND = F(
    "kind",
    _("Kind of run"),
    "choice",
    choices=(
        ("train", _("train: Orrery's own engine")),
        ("benchmark", _("benchmark: measure techniques of a plan on and off")),
        ("serve", _("serve: a model with an OpenAI-compatible API and a chat box")),
        ("generate", _("generate: answers for a file of prompts")),
        ("produce", _("produce: fine-tuning data from a served model")),
        ("evaluate", _("evaluate: metrics of a model on texts or questions")),
        ("script", _("script: your torchrun program, launched by Orrery")),
        ("external", _("external: your program runs elsewhere and reports here")),
    ),
    default="train",
    double=True,
)

SECTIONS: tuple[Section, ...] = (
    MODEL,
    WEIGHTS,
    DATA,
    SCRIPT,
    PLAN,
    AUTOTUNE,
    TRAINING,
    FINETUNING,
    REINFORCEMENT,
    ADAPTER,
    EVALUATION,
    BENCHMARK,
    PRODUCE,
    SERVE,
    GENERATE,
    EVALUATE,
    RESOURCES,
    NOTES,
)

FIELDS: tuple[SpecField, ...] = tuple(
    field for section in SECTIONS for field in (*section.fields, *section.more)
)
FIELDS_BY_PATH = {field.path: field for field in FIELDS}


def exists(field: SpecField, values: Mapping[str, str]) -> bool:
    """Whether the field exists with the selected choices, which may depend on others."""
    if field.when is None:
        return True
    path, wanted = field.when
    chosen = FIELDS_BY_PATH[path]
    return (values.get(path) or chosen.default) in wanted and exists(chosen, values)


BODIES = ("train", "generate", "serve", "evaluate", "script", "benchmark", "external", "produce")


def sections_of(kind: str) -> tuple[Section, ...]:
    """Return the sections of a run kind."""
    return tuple(section for section in SECTIONS if not section.kinds or kind in section.kinds)
