"""Parses a search request: scenario, fixed fields, objective and number of plans.

Does not depend on Django or formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from orchestrator.planner.plan_request import BadRequest, ParseOptions, Scenario
from orchestrator.planner.request_parsing import (
    SCENARIO_KEYS,
    parse_scenario,
    strip_comments,
    unknown_key_problems,
)
from orchestrator.planner.search.rank_plans import Objective
from workers.contracts.base import problem

_SEARCH_KEYS = (*SCENARIO_KEYS, "fix", "objective", "top")
_DEFAULT_TOP, _MAX_TOP = 20, 200
_DEFAULT_EXPLAINED = 3
MAX_EXPLAINED = 10  # all trees of one plan are 2 MB


@dataclass(frozen=True)
class SearchRequest:
    """A valid search request; `top_given` is false if `top` is the default."""

    scenario: Scenario
    fix: dict[str, Any]
    objective: Objective
    top: int
    top_given: bool


def parse_search_request(
    request: Any, options: ParseOptions, *, explained: bool = False
) -> SearchRequest:
    """Raises BadRequest with a problem for each wrong field."""
    if not isinstance(request, Mapping):
        raise BadRequest(
            [problem("", "a search is a JSON object", 'Use {"model": "llama3-8b", ...}.')]
        )
    request = strip_comments(request)
    problems = unknown_key_problems(request, _SEARCH_KEYS)
    scenario, more = parse_scenario(request, options)
    problems += more
    fix, objective = request.get("fix") or {}, request.get("objective") or "time"
    default, maximum = (
        (_DEFAULT_EXPLAINED, MAX_EXPLAINED) if explained else (_DEFAULT_TOP, _MAX_TOP)
    )
    top_given = request.get("top") is not None
    top = request["top"] if top_given else default
    if not isinstance(fix, Mapping):
        problems.append(problem("fix", "fix is an object of plan fields", 'Use {"tp": 8}.'))
    if type(top) is not int or not 1 <= top <= maximum:
        what = "explained plans" if explained else "plans"
        message = f"{str(top)[:40]} is not a number of {what} from 1 to {maximum}"
        problems.append(problem("top", message, f"Use {default}."))
    if not isinstance(objective, str):
        problems.append(problem("objective", "the objective is a string", "Use time."))
    if scenario is None or problems:
        raise BadRequest(problems)
    return SearchRequest(scenario, dict(fix), cast(Objective, objective), top, top_given)
