"""TPE proposals and the importance of parameters, by Optuna. Does not depend on the database.

Optuna takes a second to import, so functions import it. A study exists in memory for one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.sweeps.definition import Parameter
from orchestrator.sweeps.space import Point

STARTUP_TRIALS = 6  # random ones before the model is used
FEWEST_FOR_IMPORTANCE = 4
IMPORTANCE_METHOD = "PED-ANOVA"  # Watanabe et al., IJCAI 2023


@dataclass(frozen=True, slots=True)
class Observed:
    """A trial as a sampler sees it: `value` is None while it is under way.

    `failed` trials have no finite value; the sampler treats them as the worst.
    """

    parameters: Point
    value: float | None
    failed: bool = False


def tpe_point(
    parameters: dict[str, Parameter],
    trials: Sequence[Observed],
    *,
    minimize: bool,
    seed: int,
    number: int,
) -> Point:
    """The next point by the tree-structured Parzen estimator, given all earlier trials."""
    import optuna

    sampler = optuna.samplers.TPESampler(
        seed=seed + number, n_startup_trials=STARTUP_TRIALS, constant_liar=True
    )
    study = _study(parameters, trials, minimize=minimize, sampler=sampler)
    trial = study.ask(_distributions(parameters))
    return {path: _value(parameters[path], trial.params[path]) for path in parameters}


def importance(
    parameters: dict[str, Parameter], trials: Sequence[Observed], *, minimize: bool
) -> dict[str, float]:
    """Shares of the parameters in reaching good values, most important first; sum 1.

    By PED-ANOVA. Empty with fewer than four values, or if all values are equal.
    """
    import optuna

    done = [trial for trial in trials if trial.value is not None]
    if len(done) < FEWEST_FOR_IMPORTANCE or len({trial.value for trial in done}) < 2:
        return {}
    study = _study(parameters, done, minimize=minimize)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {path: float(share) for path, share in shares.items()}


def _study(
    parameters: dict[str, Parameter],
    trials: Sequence[Observed],
    *,
    minimize: bool,
    sampler: Any = None,
) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize" if minimize else "maximize", sampler=sampler)
    distributions = _distributions(parameters)
    values = [trial.value for trial in trials if trial.value is not None]
    worst = (max(values) if minimize else min(values)) if values else None
    for trial in trials:
        value = worst if trial.failed else trial.value
        if trial.failed and worst is None:
            continue
        state = optuna.trial.TrialState
        study.add_trial(
            optuna.trial.create_trial(
                state=state.RUNNING if value is None else state.COMPLETE,
                params={
                    path: _internal(parameters[path], trial.parameters[path]) for path in parameters
                },
                distributions=distributions,
                value=value,
            )
        )
    return study


def _distributions(parameters: dict[str, Parameter]) -> dict[str, Any]:
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    result: dict[str, BaseDistribution] = {}
    for path, parameter in parameters.items():
        if parameter.values is not None:
            result[path] = CategoricalDistribution(range(len(parameter.values)))
            continue
        assert parameter.min is not None and parameter.max is not None
        log = parameter.scale == "log"
        if parameter.integer:
            result[path] = IntDistribution(round(parameter.min), round(parameter.max), log=log)
        else:
            result[path] = FloatDistribution(parameter.min, parameter.max, log=log)
    return result


def _internal(parameter: Parameter, value: Any) -> Any:
    return parameter.values.index(value) if parameter.values is not None else value


def _value(parameter: Parameter, internal: Any) -> Any:
    return parameter.values[internal] if parameter.values is not None else internal
