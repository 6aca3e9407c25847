"""Fields of the model: an architecture to train or weights to run."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import (
    ANSWERS,
    CUSTOM_MODEL,
    MODEL_OF_WEIGHTS,
    OWN_JSON,
    OWN_PATH,
    SMOLLM2,
    F,
    Section,
)
from webui.presentation.formatting import quantity
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import PRESETS


def _presets() -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, f"{name} · {quantity(parameter_count(spec).total)}")
        for name, spec in PRESETS.items()
    )


MODEL = Section(
    "model",
    _("Model"),
    _("Architecture to train."),
    (
        F(
            "model",
            _("Model"),
            "choice",
            _("A preset architecture or your own."),
            choices=(
                *_presets(),
                (MODEL_OF_WEIGHTS, _("that of the initial weights")),
                (CUSTOM_MODEL, _("custom (JSON)")),
            ),
            default="llama-tiny",
            double=True,
        ),
        F(
            "model.custom",
            _("Custom architecture"),
            "json",
            _("A ModelSpec with at least layers, hidden, heads, ffn, vocab and max_seq_len."),
            wide=True,
        ),
    ),
    kinds=("train", "benchmark"),
    owns=("model",),
)

WEIGHTS = Section(
    "weights",
    _("Model"),
    _("Weights to run."),
    (
        F(
            "weights",
            _("Weights"),
            "choice",
            choices=(
                (SMOLLM2, _("SmolLM2-135M-Instruct: 135M parameters, chat")),
                (OWN_PATH, _("a path: Hugging Face folder, .gguf file or a run's checkpoints")),
                (OWN_JSON, _("set in the JSON")),
            ),
            default=SMOLLM2,
            double=True,
        ),
        F(
            "model.path",
            _("Path"),
            "text",
            _("A path in the models or runs folder of the data directory, or in a data root."),
            wide=True,
        ),
    ),
    kinds=ANSWERS,
    owns=("model",),
)
