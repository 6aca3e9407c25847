"""Messages are signed, sent once, retried with growing delays, and never reach inner addresses."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from django.core import mail

from orchestrator.accounts.models import User
from orchestrator.background_jobs.models import Delivery, Position, Subscription
from orchestrator.background_jobs.notifications import collect, deliver, subscriptions, webhook
from orchestrator.common import clock, secret_text
from orchestrator.common.errors import Refusal
from orchestrator.fleet.models import Node
from orchestrator.runs import services as runs
from tests import factories

pytestmark = pytest.mark.django_db


class Receiver:
    """An HTTP server on loopback that records requests and answers with `status`."""

    def __init__(self) -> None:
        self.status, self.requests = 200, []  # type: ignore[var-annotated]
        self.drip, self.location = False, ""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((dict(self.headers), body))
                while receiver.drip:  # until the sender closes the connection
                    self.wfile.write(b"H")
                    time.sleep(0.05)
                self.send_response(receiver.status)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *args: Any) -> None:
                pass  # the sender closed the connection

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?a=b"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver(settings: Any) -> Iterator[Receiver]:
    settings.ENV = settings.ENV.model_copy(update={"webhook_networks": ("127.0.0.0/8",)})
    receiver = Receiver()
    yield receiver
    receiver.drip = False
    receiver.server.shutdown()
    receiver.server.server_close()


def subscribe(by: User, target: str, **more: Any) -> tuple[Subscription, str]:
    values = {"name": "hook", "channel": "webhook", "events": subscriptions.EVENTS} | more
    return subscriptions.subscription_create(by=by, target=target, **values)


def try_test(by: User, target: str, **more: Any) -> Delivery:
    row = subscriptions.test_send(subscription=subscribe(by, target, **more)[0], by=by)
    done = deliver.deliver(row.pk)
    assert done is not None
    return done


def test_a_failed_run_is_sent_once_and_signed(owner: User, receiver: Receiver) -> None:
    collect.collect()
    _, secret = subscribe(owner, receiver.url)
    run = factories.external_run(owner)
    runs.external_finish(run=run, status="failed", reason="out of memory", by=owner)
    assert collect.collect() == 1
    assert collect.collect() == 0
    (id,) = deliver.due(now=clock.now())
    assert deliver.due(now=clock.now()) == []
    done = deliver.deliver(id)
    assert done is not None and done.state == "sent" and deliver.deliver(id) is None
    ((headers, body),) = receiver.requests
    t, v1 = (part.split("=")[1] for part in headers["Orrery-Signature"].split(","))
    expected = hmac.new(secret.encode(), t.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert v1 == expected and abs(int(t) - time.time()) < 100
    assert json.loads(body)["event"] == "run_failed" and str(run.pk) in json.loads(body)["text"]


def test_others_runs_are_reported_only_to_teams(
    owner: User, teammate: User, stranger: User, receiver: Receiver
) -> None:
    outsider = factories.user("outsider")
    collect.collect()
    for user in (teammate, outsider):
        for scope in ("own", "team"):
            subscribe(user, receiver.url, scope=scope)
    run = factories.external_run(owner)
    runs.external_finish(run=run, status="finished", reason="", by=owner)
    collect.collect()
    (row,) = Delivery.objects.all()
    assert (row.subscription.owner, row.subscription.scope) == (teammate, "team")
    with pytest.raises(Refusal):
        subscribe(stranger, receiver.url)  # a viewer


def test_a_lost_node_and_a_late_commit_are_reported(owner: User, receiver: Receiver) -> None:
    collect.collect()
    subscribe(owner, receiver.url)
    node = factories.node("n1")
    Node.objects.filter(pk=node.pk).update(health="lost", lost_at=clock.now())
    run = factories.external_run(owner)
    Position.objects.update(seen=10**9)  # newer ids were read before this commit
    runs.external_finish(run=run, status="finished", reason="", by=owner)
    assert collect.collect() == 2
    assert set(Delivery.objects.values_list("event", flat=True)) == {"node_lost", "run_finished"}


def test_server_errors_and_silence_are_retried_then_given_up(
    owner: User, receiver: Receiver
) -> None:
    receiver.status = 500
    row = try_test(owner, receiver.url)
    delays = []
    while row.state == "waiting":
        delays.append(round((row.next_try - clock.now()).total_seconds()))
        again = deliver.deliver(row.pk)
        assert again is not None
        row = again
    assert delays[:4] == [10, 40, 160, 640] and row.tries == deliver.MOST_TRIES
    assert (row.state, row.error) == ("failed", "HTTP 500")
    receiver.server.server_close()
    receiver.server.socket.close()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        down = try_test(owner, f"http://127.0.0.1:{closed.getsockname()[1]}/")
    assert down.state == "waiting" and "refused" in down.error


def test_a_slow_receiver_is_cut_off(
    owner: User, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.5)
    receiver.drip = True
    row = try_test(owner, receiver.url)
    assert row.state == "waiting" and row.error


def test_redirects_are_not_followed(owner: User, receiver: Receiver) -> None:
    receiver.status, receiver.location = 302, "http://169.254.169.254/latest/meta-data/"
    row = try_test(owner, receiver.url)
    assert row.error == "HTTP 302: redirects are not followed" and len(receiver.requests) == 1


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "localhost",
        "2130706433",
        "[fe80::1]",
        "224.0.0.1",
    ],
)
def test_inner_addresses_are_blocked(owner: User, host: str) -> None:
    row = try_test(owner, f"http://{host}/")
    assert row.state == "failed" and "not a public address" in row.error


def test_a_second_dns_answer_changes_nothing(
    owner: User, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, answers = socket.getaddrinfo, iter(["127.0.0.1"])

    def resolve(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host == "rebind.test":
            host = next(answers, "169.254.169.254")
        return real(host, port, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    row = try_test(owner, receiver.url.replace("127.0.0.1", "rebind.test"))
    assert row.state == "sent"
    assert receiver.requests[0][0]["Host"].startswith("rebind.test:")
    assert try_test(owner, "http://rebind.test/").state == "failed"


@pytest.mark.parametrize("url", ["ftp://a.b/", "http://u:p@a.b/", "http://a.b:99999/", "x", ""])
def test_urls_are_checked_on_creation(owner: User, url: str) -> None:
    with pytest.raises(Refusal) as refusal:
        subscribe(owner, url)
    assert refusal.value.status == 422


def test_slack_and_mail(owner: User, receiver: Receiver, settings: Any) -> None:
    assert try_test(owner, receiver.url, channel="slack").state == "sent"
    assert json.loads(receiver.requests[0][1]) == {"text": "Test message, requested by owner."}
    settings.EMAIL_HOST = "mail.test"
    with pytest.raises(Refusal):
        subscribe(owner, "someone@else.test", channel="email")
    owner.email = "owner@lab.test"
    owner.save()
    assert try_test(owner, "owner@lab.test", channel="email").state == "sent"
    assert mail.outbox[0].to == ["owner@lab.test"]


def test_secrets_are_encrypted_and_survive_a_change_of_key(owner: User, settings: Any) -> None:
    url = "https://hooks.example.com/T0/secret"
    row, secret = subscribe(owner, url)
    assert url not in row.target and secret not in row.secret
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "another"
    assert secret_text.decrypt(row.target, purpose=subscriptions.PURPOSE) == url
    for stored, purpose in ((row.target, "other"), (row.target[:-4] + "AAA=", "subscription")):
        with pytest.raises(secret_text.Unreadable):
            secret_text.decrypt(stored, purpose=purpose)
    text = factories.client_for(owner).get("/account/notifications/").content.decode()
    assert "hooks.example.com" in text and "/T0/secret" not in text and secret not in text


def test_rest_and_page_create_and_test(owner: User, receiver: Receiver) -> None:
    api = factories.api(owner)
    body = {"name": "a", "channel": "webhook", "target": receiver.url, "events": ["run_failed"]}
    made = api.post("/api/v1/notifications", body, content_type="application/json")
    assert made.status_code == 201 and made.json()["secret"].startswith("whsec_")
    path = f"/api/v1/notifications/{made.json()['id']}"
    assert api.post(f"{path}/test", {}, content_type="application/json").status_code == 201
    assert api.get(f"{path}/deliveries").json()["items"][0]["state"] == "waiting"
    page = factories.client_for(owner)
    answer = page.post("/account/notifications/", body)
    assert "whsec_" in answer.content.decode()
    assert page.post("/account/notifications/", {**body, "target": "x"}).status_code == 422
    assert api.delete(path).status_code == 204 and Subscription.objects.count() == 1


def test_a_message_lost_on_the_way_to_the_worker_is_sent_again(
    owner: User, receiver: Receiver
) -> None:
    row, _ = subscribe(owner, receiver.url)
    sent = subscriptions.test_send(subscription=row, by=owner)
    now = clock.now()
    assert deliver.due(now=now) == [sent.pk]
    assert deliver.due(now=now + deliver.CLAIM + timedelta(seconds=1)) == [sent.pk]
