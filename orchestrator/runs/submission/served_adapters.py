"""Checks a change of a serve run's adapters before its server gets it: who, and which files.

Does not call the server.
"""

from __future__ import annotations

from django.conf import settings

from orchestrator.accounts import selectors as people
from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.common.errors import invalid
from orchestrator.runs.lifecycle.actions import require_manage
from orchestrator.runs.models import Run
from orchestrator.runs.submission.absolute_paths import absolute_path
from orchestrator.runs.submission.data_paths import resolve_path
from orchestrator.runs.submission.run_paths import run_path_problems
from orchestrator.runs.submission.weights import models_root


def adapter_load(*, run: Run, by: User, name: str, path: str) -> str:
    """The absolute path of an adapter that `by` may load into the run's server; audited.

    Relative paths mean those under data roots, downloaded models and the data directory. Raises
    Refusal 403 for a run of another owner, 422 for a path that a spec of `by` could not name.
    """
    require_manage(run, by)
    models, data_roots = models_root(), settings.DATA_ROOTS
    roots = [*data_roots, models, models.parent]
    owners, problems = people.visible_owners(by), []
    if owners is not None:
        problems = run_path_problems(
            {"lora_path": path},
            roots=roots,
            run_root=settings.ENV.media_runs,
            may_see=lambda id: Run.objects.filter(pk=id, owner__in=owners).exists(),
        )
    if not problems and "\0" not in path:
        path = str(absolute_path(path, roots))
    allowed = [*data_roots, models, settings.ENV.media_runs]
    resolved, wrong = resolve_path("lora_path", path, allowed)
    if problems or resolved is None:
        first = (problems or wrong)[0]
        raise invalid(first.field, first.message, first.hint)
    accounts.audit(actor=by, action="run.load_adapter", target=f"run:{run.pk}", data={"name": name})
    return str(resolved)


def adapter_unload(*, run: Run, by: User, name: str) -> None:
    """Check that `by` may unload an adapter of the run's server; audited. Raises Refusal 403."""
    require_manage(run, by)
    accounts.audit(
        actor=by, action="run.unload_adapter", target=f"run:{run.pk}", data={"name": name}
    )
