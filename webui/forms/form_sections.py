"""Sections of the new-run form: fields with values and errors, and the table for the script."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from webui.forms.spec_fields import (
    ANSWERS,
    BODIES,
    CUSTOM_MODEL,
    DATA_SET,
    MODEL_OF_WEIGHTS,
    OWN_FILE,
    OWN_JSON,
    OWN_PATH,
    SECTIONS,
    SMOLLM2,
    TRAINS,
    SpecField,
    exists,
)
from workers.contracts.catalog.presets import PRESETS
from workers.contracts.specs.inference_support import PACKAGES

# shown for own text files only
FILE_FIELDS = ("data.path", "data.format", "data.tokenizer", "data.document_masks")


# fields that complete names of data sets and of files in the data roots
_INPUTS = (
    "generate.input",
    "evaluate.input",
    "evaluate.references",
    "train.evaluate.input",
    "train.evaluate.references",
    "produce.seeds",
)


def form_section(
    section: Any, values: dict[str, str], errors: dict[str, Any], kind: str
) -> dict[str, Any]:
    """A section for the template: titles, fields with value and errors, and what is hidden."""
    shown = {
        "key": section.key,
        "title": _(section.title),
        "more_title": _(section.more_title) if section.more_title else "",
        "description": _(section.description),
        "kinds": section.kinds,
        "hidden": bool(section.kinds) and kind not in section.kinds,
        "fields": [_item(field, values, errors, kind) for field in section.fields],
        "more": [_item(field, values, errors, kind) for field in section.more],
    }
    shown["hidden"] |= all(item["hidden"] for item in (*shown["fields"], *shown["more"]))
    shown["more_hidden"] = all(item["hidden"] for item in shown["more"])
    shown["open"] = any(
        item["errors"] or (item["value"] and item["value"] != item["field"].default)
        for item in shown["more"]
    ) and section.key in ("plan", "finetuning", "adapter", "evaluation", *ANSWERS)
    return shown


def _item(
    field: SpecField, values: dict[str, str], errors: dict[str, Any], kind: str
) -> dict[str, Any]:
    value = values.get(field.path, "")
    choices = field.choices
    if field.kind == "choice" and value not in dict(choices):
        choices = (*choices, (value, value))
    hidden = (
        (field.path == "model.custom" and values["model"] != CUSTOM_MODEL)
        or (field.path in FILE_FIELDS and values["data.preset"] != OWN_FILE)
        or (field.path == "model.path" and values["weights"] != OWN_PATH)
        or (field.path.startswith("plan.") and values["plan"] == "auto" and kind in TRAINS)
        or not field.applies_to(kind)
        or not exists(field, values)
    )
    return {
        "field": field,
        "input_fields": _INPUTS,
        "value": value,
        "label": _(field.label),
        "help": _(field.help) if field.help else "",
        "placeholder": _(field.default) if field.default else "",
        "choices": [(name, _(label) if label else "") for name, label in choices],
        "errors": errors.get(field.path, []),
        "hidden": hidden,
    }


def field_table() -> dict[str, Any]:
    """Return the field table for the page's script."""
    return {
        "sections": [
            {
                "key": section.key,
                "kinds": section.kinds,
                "owns": section.owns,
                "fields": [
                    {
                        "path": field.path,
                        "kind": field.kind,
                        "default": field.default,
                        "gates": field.gates,
                        "kinds": field.kinds,
                        "when": field.when,
                    }
                    for field in (*section.fields, *section.more)
                ],
            }
            for section in SECTIONS
        ],
        "bodies": BODIES,
        "trains": TRAINS,
        "answers": ANSWERS,
        "custom": CUSTOM_MODEL,
        "initial": MODEL_OF_WEIGHTS,
        "file": OWN_FILE,
        "dataset": DATA_SET,
        "json": OWN_JSON,
        "path": OWN_PATH,
        "first": SMOLLM2,
        "presets": list(PRESETS),
        "packages": list(PACKAGES),
    }
