"""Data tab of a fine-tuning run: its first rows as tokens by loss weight, and what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from orchestrator.runs.outputs import training_data
from webui.charts.example_rows import picture_rows
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED
from workers.contracts.wire.samples import RowDocument, TokenPiece, TrainingRow

_MOST_BINS: Final = 20


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    rows = training_data.training_rows(run=facts.run)
    statistics = training_data.data_statistics(run=facts.run)
    trained = training_data.trained_parameters(run=facts.run)
    return {
        "calibration": calibration(facts.latest),
        "parameters": parameters(trained) if trained is not None else None,
        "sources": sources(statistics) if statistics is not None else [],
        "data_sentence": sentence(statistics) if statistics is not None else "",
        "rows": [_row(row) for row in rows.rows] if rows is not None else [],
        "pictures": _pictures(rows.rows, rows.seq_len) if rows is not None else [],
        "seq_len": rows.seq_len if rows is not None else None,
        "reads_examples": facts.reads_examples,
        "template": rows.template if rows is not None else "",
        "waiting": facts.run.state not in ENDED,
        "source": facts.source(),
    }


def sentence(statistics: dict[str, Any]) -> str:
    """What matters most about the run's data."""
    every = list(statistics["sources"].values())
    samples = sum(each.get("samples", 0) for each in every)
    tokens = sum(each.get("tokens", 0) for each in every)
    trained = sum(each.get("trained_tokens", 0) for each in every)
    cut = sum(each.get("truncated", 0) for each in every)
    dropped = sum(each.get("dropped", 0) for each in every)
    text = ngettext("%(count)s example", "%(count)s examples", samples) % {
        "count": formatting.quantity(samples)
    }
    text += _(", %(share)s of their tokens have loss") % {
        "share": formatting.percent(trained / max(1, tokens))
    }
    if not cut and not dropped:
        return text + _("; all fit into a sequence.")
    if cut:
        text += ngettext("; %(count)s is truncated", "; %(count)s are truncated", cut) % {
            "count": formatting.quantity(cut)
        }
    if dropped:
        text += ngettext(
            "; %(count)s is left out because its answer does not fit",
            "; %(count)s are left out because their answers do not fit",
            dropped,
        ) % {"count": formatting.quantity(dropped)}
    return text + "."


def sources(statistics: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the statistics of each source as text."""
    return [
        {
            "name": name,
            "samples": formatting.quantity(each.get("samples")),
            "rows": formatting.quantity(each.get("rows")),
            "tokens": formatting.quantity(each.get("tokens")),
            "trained": formatting.quantity(each.get("trained_tokens")),
            "packing": formatting.percent(each.get("packing_efficiency")),
            "longest": formatting.quantity(each.get("longest")),
            "truncated": formatting.quantity(each.get("truncated")),
            "dropped": formatting.quantity(each.get("dropped")),
        }
        for name, each in statistics["sources"].items()
    ]


def calibration(latest: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the bins of a reward model's confidence, `{confidence, accuracy, pairs, x, y}`.

    Of validation if there is one, else of training; `x` and `y` are places in a drawing of 100.
    """
    prefix = (
        "val_reward" if any(name.startswith("val_reward/bin_") for name in latest) else "reward"
    )
    bins = []
    for number in range(_MOST_BINS):
        name = f"{prefix}/bin_{number}"
        confidence, accuracy = latest.get(f"{name}/confidence"), latest.get(f"{name}/accuracy")
        if confidence is None or accuracy is None:
            continue
        bins.append(
            {
                "confidence": formatting.percent(confidence),
                "accuracy": formatting.percent(accuracy),
                "pairs": formatting.quantity(latest.get(f"{name}/pairs")),
                "x": f"{100 * confidence:.1f}",
                "y": f"{100 - 100 * accuracy:.1f}",
            }
        )
    return bins


def parameters(trained: training_data.TrainedParameters) -> dict[str, str]:
    """Return `{sentence, frozen, share}`: how many parameters are updated, and what is frozen."""
    # an adapter's parameters are added to the model's; those of frozen patterns are part of it
    whole = trained.total + (trained.trained if trained.adapter else 0)
    share = trained.trained / max(1, whole)
    if trained.adapter:
        frozen = _("The model's own weights are frozen")
        if trained.storage:
            frozen += _(" and stored in %(type)s") % {"type": trained.storage.upper()}
        frozen += "."
    elif trained.frozen:
        frozen = _("Frozen: %(patterns)s.") % {"patterns": ", ".join(trained.frozen)}
    else:
        frozen = _("Nothing is frozen.")
    return {
        "share": f"{100 * share:.4g}",
        "sentence": _("%(trained)s of %(total)s parameters are trained (%(share)s).")
        % {
            "trained": formatting.quantity(trained.trained),
            "total": formatting.quantity(whole),
            "share": formatting.percent(share),
        },
        "frozen": frozen,
    }


def _pictures(rows: list[TrainingRow], seq_len: int) -> list[dict[str, Any]]:
    return picture_rows(
        [
            [
                {"line": each.line, "tokens": each.tokens, "trained": each.trained}
                for each in row.documents
            ]
            for row in rows
        ],
        seq_len,
    )


def _row(row: TrainingRow) -> dict[str, Any]:
    return {
        "source": row.source,
        "padding": row.padding,
        "documents": [_document(each) for each in row.documents],
    }


def _document(document: RowDocument) -> dict[str, Any]:
    return {
        "line": document.line,
        "role": _(document.role) if document.role else "",
        "tokens": document.tokens,
        "trained": document.trained,
        "hidden": document.hidden,
        "pieces": [_piece(each) for each in document.pieces],
    }


def _piece(piece: TokenPiece) -> dict[str, Any]:
    """Weights between 0 and 1 get a paler color."""
    share = min(1.0, piece.weight)
    return {
        "use": "trained" if piece.weight > 0 else "read",
        "share": "" if share in (0.0, 1.0) else f"{share:.3f}",
        "title": _("loss weight %(weight)s") % {"weight": f"{piece.weight:g}"},
        "tokens": piece.tokens,
    }
