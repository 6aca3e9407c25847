"""Side-by-side chats: both models answer a message, a person votes without knowing which is which.

The control plane asks the servers itself: a browser that did would see them. Does not count votes
(`votes`).
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
from django.db import transaction
from django.db.models import QuerySet

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, conflict, invalid, missing_object
from orchestrator.common.units import is_id
from orchestrator.reviews import votes
from orchestrator.reviews.models import ComparisonTurn, ModelComparison
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run
from orchestrator.runs.outputs import endpoint
from orchestrator.runs.outputs.endpoint import EndpointStatus

MOST_TOKENS: Final = 4096
MOST_TEXT: Final = 100_000  # characters of a message
ANSWER_S: Final = 300.0  # for both answers together
MOST_BYTES: Final = 1 << 20  # of a server's response
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")  # which PostgreSQL does not store
_LATE: Final = f"it took longer than {ANSWER_S:.0f} s"
_chance = random.SystemRandom()
_running = threading.BoundedSemaphore(4)  # turns in progress per process


def comparison_create(
    *,
    by: User,
    run_ids: Sequence[int],
    models: Sequence[str | None] = (None, None),
    temperature: float = 0.7,
    top_p: float = 1.0,
    max_tokens: int = 512,
    system: str = "",
) -> ModelComparison:
    """Compare the models of two serve runs; `models` name others of the same servers.

    Raises 403 for viewers, 404, 409 for a run that does not serve, 422 for one model twice.
    """
    accounts.require_role(by, Role.SUBMITTER, "compare models")
    if len(run_ids) != 2 or len(models) != 2:
        raise invalid("runs", f"{len(run_ids)} runs are given", "Use two serve runs.")
    statuses = [_endpoint(by, id) for id in run_ids]
    ids = [model or _serving_model(status) for model, status in zip(models, statuses, strict=True)]
    for place, model in enumerate(models):
        if model is not None:
            _check_model(by, run_ids[place], model, place)
    if (run_ids[0], ids[0]) == (run_ids[1], ids[1]):
        raise invalid(
            "runs", "both sides are the same model", "Use two runs, or two models of a run."
        )
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": min(max_tokens, MOST_TOKENS),
        **({"system": system} if system.strip() else {}),
    }
    row = ModelComparison.objects.create(
        owner=by, created=clock.now(), runs=list(run_ids), model_ids=ids, sampling=sampling
    )
    accounts.audit(
        actor=by, action="comparison.create", target=f"comparison:{row.pk}", data={"runs": row.runs}
    )
    return row


def turn_create(
    *, comparison: ModelComparison, by: User, text: str, conversation: int | None = None
) -> ComparisonTurn:
    """Both answers to a message; in a conversation, after the answers voted for.

    Raises 404, 409 while the last answers of the conversation have no vote or a run does not serve,
    422, 429 while this process waits for four other turns, and 503 if a server fails.
    """
    accounts.require_role(by, Role.SUBMITTER, "compare models")
    if not text.strip() or len(text) > MOST_TEXT:
        raise invalid("text", f"a message has 1 to {MOST_TEXT:,} characters", "Write a text.")
    messages = _history(comparison, by, conversation)
    messages.append({"role": "user", "content": text})
    first = _chance.randrange(2)
    answers = _answers(comparison, by, messages)
    with transaction.atomic():
        turn = ComparisonTurn.objects.create(
            comparison=comparison,
            conversation=conversation or 0,
            messages=messages,
            answers=[answers[first], answers[1 - first]],
            first_model=first,
            by=by.username,
            created=clock.now(),
        )
        if conversation is None:
            turn.conversation = turn.pk
            turn.save(update_fields=["conversation"])
    return turn


def turn_get(*, comparison: ModelComparison, id: int | str) -> ComparisonTurn:
    """A turn of the comparison. Raises 404."""
    rows = ComparisonTurn.objects.filter(comparison=comparison)
    row = rows.filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("turn", id)
    return row


def turn_vote(*, turn: ComparisonTurn, by: User, choice: str) -> ComparisonTurn:
    """Store the vote of the person who asked, once. Raises 403 for viewers, 409, 422."""
    accounts.require_role(by, Role.SUBMITTER, "vote")
    known = [value for value in ComparisonTurn.Choice.values if value]
    if choice not in known:
        raise invalid("choice", f"{choice!r} is not a vote", f"Use one of {', '.join(known)}.")
    if turn.by != by.username:
        raise conflict(f"{turn.by} asked, and votes.", type="vote-of-another")
    unvoted = ComparisonTurn.objects.filter(pk=turn.pk, choice="")
    if not conditional.update(unvoted, choice=choice, voted=clock.now()):
        raise conflict("This turn has its vote.", type="already-voted")
    turn.refresh_from_db()
    return turn


def turn_rows(*, comparison: ModelComparison) -> QuerySet[ComparisonTurn]:
    """All turns, newest first."""
    rows = ComparisonTurn.objects.filter(comparison=comparison).select_related("comparison")
    return rows.order_by("-pk")


def serialize_turn(turn: ComparisonTurn) -> dict[str, Any]:
    """The turn as REST shows it: which model is which only after the vote.

    `models` have their runs: two checkpoints of a step may have one id.
    """
    return {
        "id": turn.pk,
        "conversation": turn.conversation,
        "messages": turn.messages,
        "a": turn.answers[0],
        "b": turn.answers[1],
        "choice": turn.choice or None,
        "models": votes.shown_labels(turn) if turn.choice else None,
        "by": turn.by,
        "created": turn.created,
        "voted": turn.voted,
    }


def _history(
    comparison: ModelComparison, by: User, conversation: int | None
) -> list[dict[str, str]]:
    """The messages so far, with the answers that were voted for."""
    system = comparison.sampling.get("system")
    start = [{"role": "system", "content": str(system)}] if system else []
    if conversation is None:
        return start
    rows = ComparisonTurn.objects.filter(
        comparison=comparison, conversation=conversation, by=by.username
    )
    last = rows.order_by("-pk").first()
    if last is None:
        raise missing_object("conversation", conversation)
    if not last.choice:
        raise conflict("Vote on the last answers first.", type="vote-missing")
    answer = last.answers[1 if last.choice == "b" else 0]
    return [*last.messages, {"role": "assistant", "content": answer}]


def _answers(comparison: ModelComparison, by: User, messages: list[dict[str, str]]) -> list[str]:
    """Both models' answers, in the comparison's order."""
    statuses = [_endpoint(by, id) for id in comparison.runs]
    if not _running.acquire(blocking=False):
        detail = "Four other comparisons wait for their answers. Send the message again later."
        raise Refusal("busy", "Too many comparisons", 429, detail, retry_after_s=5)
    pool = ThreadPoolExecutor(2)
    try:
        deadline = time.monotonic() + ANSWER_S
        pending = [
            pool.submit(_answer, status, model, comparison.sampling, messages, deadline)
            for status, model in zip(statuses, comparison.model_ids, strict=True)
        ]
        return [each.result(max(0.0, deadline - time.monotonic())) for each in pending]
    except TimeoutError:
        raise _failed(_LATE) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # its requests end by their own time limits
        _running.release()


def _answer(
    status: EndpointStatus,
    model: str,
    sampling: dict[str, Any],
    messages: list[dict[str, str]],
    deadline: float,
) -> str:
    body = {
        "model": model,
        "messages": messages,
        **{name: value for name, value in sampling.items() if name != "system"},
    }
    left = max(0.1, deadline - time.monotonic())
    try:
        with httpx.stream(
            "POST",
            f"{status.url}/v1/chat/completions",
            json=body,
            headers=status.headers,
            timeout=httpx.Timeout(left, connect=min(5.0, left)),
            trust_env=False,
        ) as response:
            received = _read(response, deadline)
            if response.status_code != 200:
                raise _refused(response.status_code, received)
        text = json.loads(received)["choices"][0]["message"]["content"]
    except httpx.TimeoutException:
        raise _failed(_LATE) from None
    except httpx.HTTPError as error:
        raise _failed(f"the connection failed ({type(error).__name__})") from None
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise _failed("its response is not a chat completion") from None
    if not isinstance(text, str):
        raise _failed("its response has no text")
    return _UNSTORABLE.sub("\ufffd", text.strip())


def _read(response: httpx.Response, deadline: float) -> bytes:
    """The body, of limited size, before the deadline."""
    received = bytearray()
    # chunks as they arrive: a fixed size would delay the check of the deadline until it is full
    for chunk in response.iter_bytes():
        received += chunk
        if len(received) > MOST_BYTES:
            raise _failed(f"its response is larger than {MOST_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise _failed(_LATE)
    return bytes(received)


def _refused(status: int, received: bytes) -> Refusal:
    """Of a response that is no answer; a context that is too short has a remedy of its own."""
    try:
        code = json.loads(received)["error"]["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        code = None
    if code == "context_length_exceeded":
        return _failed(
            "the conversation with its answer exceeds the model's context",
            "Start a comparison with fewer max tokens, or send a shorter message.",
        )
    return _failed(f"its status is {status}")


def _failed(reason: str, hint: str = "Check both runs, and send it again.") -> Refusal:
    # naming the server, or quoting its response, would show which answer is whose
    detail = f"One of the servers did not answer: {reason}. {hint}"
    return Refusal("server-failed", "A server failed", 503, detail, retry=True)


def _endpoint(by: User, id: int) -> EndpointStatus:
    run = runs.run_get(user=by, id=id)
    if run.kind != "serve":
        raise invalid("runs", f"run {run.pk} is a {run.kind} run", "Use two serve runs.")
    status = endpoint.status(run=run)
    if status.phase != "serving":
        raise conflict(status.message, type="run-not-serving")
    if status.serving is not None and not status.serving.chat:
        message = f"the model of run {run.pk} has no chat template"
        raise invalid("runs", message, "Use an instruction-tuned model.")
    return status


def served_models(*, run: Run, status: EndpointStatus) -> list[str]:
    """The ids of the models that a serving run answers for: its own, then its adapters."""
    serve = (run.spec or {}).get("serve") or {}
    has_slots = bool(serve.get("adapters") or serve.get("adapter_slots"))
    state = endpoint.engine_state(run=run) if has_slots else None
    adapters = [] if state is None else [adapter.name for adapter in state.adapters]
    return [_serving_model(status), *adapters]


def _check_model(by: User, id: int, model: str, place: int) -> None:
    """Raises 422 for a model that the run does not serve."""
    run = runs.run_get(user=by, id=id)
    status = endpoint.status(run=run)
    if status.serving is None or status.serving.backend != "orrery":
        return
    known = served_models(run=run, status=status)
    if model not in known:
        shown = ", ".join(known[:10]) + (", …" if len(known) > 10 else "")
        message = f"run {id} serves no model {model[:100]}"
        raise invalid(f"models.{place}", message, f"Use one of {shown}.")


def _serving_model(status: EndpointStatus) -> str:
    assert status.serving is not None
    return status.serving.model
