"""Review pages: begin a review, decide line by line, write the decisions to a reviewed file."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import invalid
from orchestrator.reviews import reviewed_files, selectors, services
from orchestrator.runs.submission.examples.example_preview import example_files
from webui.presentation import formatting
from webui.views.access import PageRequest, has_role, page, redirect_with_message, require_role
from webui.views.list_with_form import list_with_form
from workers.contracts.specs.data import EXAMPLE_FORMATS

SHOWN = 100
RATINGS = range(1, 6)
SHOW = {
    "all": gettext_noop("all lines"),
    "undecided": gettext_noop("undecided"),
    "keep": gettext_noop("kept"),
    "drop": gettext_noop("dropped"),
    "swap": gettext_noop("swapped"),
    "edited": gettext_noop("edited"),
}


@page
@require_http_methods(["GET", "POST"])
def reviews(request: PageRequest) -> HttpResponse:
    """List reviews; POST begins one of a file or of a produce run."""

    def content() -> dict[str, Any]:
        rows = selectors.reviews_visible_to(user=request.user).order_by("-pk")[:SHOWN]
        return {
            "title": _("Reviews"),
            "sentence": _(
                "People keep, drop, rate and edit the lines of a file, or choose the better answer "
                "of each pair. The result is a new file that runs can train on."
            ),
            "data_tab": "reviews",
            "rows": [_row(review) for review in rows],
            "may_begin": has_role(request.user, Role.SUBMITTER),
            "formats": EXAMPLE_FORMATS,
            "files": example_files() if has_role(request.user, Role.SUBMITTER) else [],
        }

    return list_with_form(
        request, "webui/data/reviews.html", create=_begin, address="review", content=content
    )


@page
@require_GET
def review(request: PageRequest, id: int) -> HttpResponse:
    """Show one review: its lines are read and decided by the page's script."""
    row = selectors.review_get(user=request.user, id=id)
    counts = selectors.counts(review=row)
    decided = row.lines - counts["undecided"]
    pairs = row.format == services.PAIRS
    context = {
        "title": row.name,
        "data_tab": "reviews",
        "review": row,
        "counts": counts,
        "sentence": _sentence(row, counts),
        "part": f"{100 * decided / row.lines:.1f}",
        "pairs": pairs,
        "ratings": RATINGS,
        "may_review": has_role(request.user, Role.SUBMITTER),
        "may_delete": services.may_delete(row, request.user),
        "reviewers": selectors.reviewers(review=row),
        "reviewed_files": list(selectors.reviewed_files_of(review=row)[:20]),
        "as_pairs": row.format in ("messages", "prompt_completion"),
        "show": [(name, _(SHOW[name])) for name in selectors.SHOW if pairs or name != "swap"],
        "config": {
            "url": f"/api/v1/reviews/{row.pk}",
            "lines": row.lines,
            "pairs": pairs,
            "may_review": has_role(request.user, Role.SUBMITTER),
        },
    }
    return render(request, "webui/data/review.html", context)


@page
@require_POST
def review_write(request: PageRequest, id: int) -> HttpResponse:
    """Write the decisions to a reviewed file."""
    row = selectors.review_get(user=request.user, id=id)
    rating = request.POST.get("min_rating", "")
    undecided = request.POST.get("undecided", "drop")
    writes = request.POST.get("writes", "lines")
    if rating not in ("", *map(str, RATINGS)):
        raise invalid(
            "min_rating", _("%(value)s is not a rating") % {"value": rating}, "Use 1 to 5."
        )
    made = reviewed_files.review_write(
        review=row,
        by=request.user,
        writes="edits_as_pairs" if writes == "edits_as_pairs" else "lines",
        undecided="keep" if undecided == "keep" else "drop",
        min_rating=int(rating) if rating else None,
    )
    return redirect_with_message(request, written(made), "review", row.pk)


@page
@require_POST
def review_delete(request: PageRequest, id: int) -> HttpResponse:
    """Delete a review with its decisions."""
    row = selectors.review_get(user=request.user, id=id)
    services.review_delete(review=row, by=request.user)
    return redirect_with_message(request, _("Review deleted."), "reviews")


def written(row: Any) -> str:
    """Say what was written and where."""
    text = ngettext(
        "%(count)s line written to %(path)s.",
        "%(count)s lines written to %(path)s.",
        row.lines,
    )
    return text % {"count": f"{row.lines:,}", "path": row.path}


def _begin(request: PageRequest) -> Any:
    require_role(request.user, Role.SUBMITTER, _("Beginning a review"))
    run = request.POST.get("run", "").strip()
    path = request.POST.get("path", "").strip()
    if run and not (run.isascii() and run.isdecimal() and len(run) < 19):
        raise invalid("run", _("%(value)s is not a run's number") % {"value": run[:40]})
    given: Any = request.POST.get("format") or None
    if given not in (None, *EXAMPLE_FORMATS):
        raise invalid("format", _("%(value)s is not a format") % {"value": str(given)[:40]})
    return services.review_create(
        by=request.user,
        name=request.POST.get("name", ""),
        path=path or None,
        run=int(run) if run else None,
        format=given,
    )


def _row(review: Any) -> dict[str, Any]:
    counts = selectors.counts(review=review)
    decided = review.lines - counts["undecided"]
    return {
        "review": review,
        "counts": counts,
        "decided": f"{decided:,}",
        "lines": f"{review.lines:,}",
        "part": f"{100 * decided / review.lines:.1f}",
    }


def _sentence(review: Any, counts: dict[str, int]) -> str:
    decided = review.lines - counts["undecided"]
    if not decided:
        text = ngettext(
            "%(count)s line, none decided yet.", "%(count)s lines, none decided yet.", review.lines
        )
        return text % {"count": formatting.quantity(review.lines)}
    parts = [
        part % {"count": f"{counts[name]:,}"}
        for name, part in (
            ("keep", _("%(count)s kept")),
            ("swap", _("%(count)s swapped")),
            ("drop", _("%(count)s dropped")),
            ("edited", _("%(count)s edited")),
        )
        if counts[name]
    ]
    return _("%(decided)s of %(lines)s lines decided: %(parts)s.") % {
        "decided": f"{decided:,}",
        "lines": f"{review.lines:,}",
        "parts": formatting.listed(parts),
    }
