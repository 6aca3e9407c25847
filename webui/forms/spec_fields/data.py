"""Fields of the training data."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import OWN_FILE, OWN_JSON, F, Section, same
from workers.contracts.specs.data import EXAMPLE_FORMATS

DATA = Section(
    "data",
    _("Data"),
    _("Training data."),
    (
        F(
            "data.preset",
            _("Text"),
            "choice",
            choices=(
                ("shakespeare", _("shakespeare: included with Orrery, raw bytes")),
                (OWN_FILE, _("a file in the data roots")),
                (OWN_JSON, _("set in the JSON: weighted sources")),
            ),
            default="shakespeare",
            double=True,
        ),
        F(
            "data.path",
            _("Path"),
            "text",
            _("A path in one of the allowed data roots."),
            double=True,
        ),
        F(
            "data.format",
            _("Format"),
            "choice",
            choices=same("text", "jsonl", "tokens", *EXAMPLE_FORMATS),
            default="text",
        ),
        F(
            "data.tokenizer",
            _("Tokenizer"),
            "text",
            _("A tokenizer.json or its folder; default: the weights' tokenizer, or bytes."),
        ),
        F(
            "data.document_masks",
            _("Document masks"),
            "choice",
            _("Restrict attention to one document if a sequence packs several."),
            choices=(
                ("", _("if documents are known")),
                ("true", _("yes")),
                ("false", _("no, as in GPT-3")),
            ),
        ),
    ),
    kinds=("train", "benchmark"),
    owns=("data",),
)
