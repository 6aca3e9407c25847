"""The proxy of the fault injection: which requests it recognizes, and what doubling does."""

from __future__ import annotations

import queue
import socket
import socketserver
import threading

from tests.chaos.proxy import Commands, Proxy


def request(*words: bytes) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


def test_requests_are_recognized_however_the_bytes_arrive() -> None:
    login = request(b"AUTH", b"default", b"secret")
    first, second = request(b"xadd", b"s", b"*", b"m", b"a\r\nb"), request(b"GET", b"k")
    text = login + first + request(b"MULTI") + second + request(b"EXEC") + second
    for size in (1, 7, len(text)):
        commands, result = Commands(), []
        for start in range(0, len(text), size):
            result += commands.feed(text[start : start + size])
        assert [(item.name, item.text) for item in result] == [
            (b"AUTH", login),
            (b"XADD", first),
            (b"GET", second),
        ]
        assert commands.login == login


def test_a_doubled_message_arrives_again_on_its_own_connection() -> None:
    received: queue.Queue[bytes] = queue.Queue()

    class Broker(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while data := self.request.recv(65536):
                received.put(data)
                self.request.sendall(b"+OK\r\n")

    broker = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Broker)
    broker.daemon_threads = True
    threading.Thread(target=broker.serve_forever, daemon=True).start()
    proxy = Proxy(broker.server_address[1])
    proxy.double_s = 0.01
    login, message = request(b"AUTH", b"secret"), request(b"XADD", b"s", b"*", b"m", b"one")
    plain = request(b"SET", b"k", b"not a message")
    try:
        with socket.create_connection((proxy.host, proxy.port), 60) as client:
            client.sendall(login)
            assert received.get(timeout=60) == login
            client.sendall(message)
            assert sorted(received.get(timeout=60) for _ in range(2)) == sorted(
                [message, login + message]
            )
            client.sendall(plain)
            assert received.get(timeout=60) == plain
    finally:
        proxy.close()
        broker.shutdown()
        broker.server_close()
    assert received.empty()
