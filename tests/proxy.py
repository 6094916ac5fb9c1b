"""A TCP proxy before a PostgreSQL server that cuts a connection at a chosen message, or lets it fall silent.

It understands of the protocol where messages begin and end, and what a client calls itself.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Message:
    """`sender` is "client" or "server"; `client` is the application name; a client's first message has no `kind`."""

    sender: str
    client: str
    kind: bytes
    body: bytes

    @property
    def ends_transaction(self) -> bool:
        """Whether it is the server's word that a COMMIT is done."""
        return self.sender == "server" and self.kind == b"C" and self.body == b"COMMIT\0"


class Proxy:
    """Before the server at `url`, whose socket is in a folder. Threads serve it until `close`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._server = f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}"
        self._door = socket.create_server(("127.0.0.1", 0))
        host, port = self._door.getsockname()
        self.url = f"postgresql://{parts.username}@{host}:{port}{parts.path}?sslmode=disable&gssencmode=disable"
        self._lock = threading.Lock()
        self._when: Callable[[Message], bool] | None = None
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.fired = False
        self.seen = 0
        self.seen_at = time.monotonic()
        self._client = ""
        self._silence: Callable[[Message], bool] | None = None
        self._to_be_silent: tuple[socket.socket, socket.socket] | None = None
        self._silent: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._serve, name="proxy", daemon=True).start()

    def cut(self, when: Callable[[Message], bool], *, client: str = "") -> None:
        """Once: withhold the first message, from or to clients whose name begins with `client`, for which `when` is
        true, and close that connection in both directions."""
        with self._lock:
            self.fired, self.seen, self._client, self._when = False, 0, client, when

    def silence(self, when: Callable[[Message], bool]) -> None:
        """Once: after the answer of which `when` is true for a message, nothing passes on that connection any more; it
        stays open."""
        with self._lock:
            self.fired, self._silence = False, when

    def close(self) -> None:
        self._door.close()
        for pair in self._pairs:
            _cut(pair)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._door.accept()
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(self._server)
                except OSError:  # it is just now away
                    server.close()
                    client.close()
                    continue
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pair = (client, server)
                self._pairs.append(pair)
                threading.Thread(target=self._pass_on, args=("client", *pair, pair), daemon=True).start()

    def _pass_on(
        self,
        sender: str,
        source: socket.socket,
        sink: socket.socket,
        pair: tuple[socket.socket, socket.socket],
        name: str = "",
    ) -> None:
        with contextlib.suppress(OSError):
            for kind, body in _messages(source, started=sender == "server"):
                if not kind:  # who it is; only now is there anything to hear from the server
                    words = body[4:].split(b"\0")
                    name = dict(zip(words[::2], words[1::2], strict=False)).get(b"application_name", b"").decode()
                    threading.Thread(
                        target=self._pass_on, args=("server", sink, source, pair, name), daemon=True
                    ).start()
                message = Message(sender, name, kind, body)
                if self._is_cut(message):
                    break
                if pair not in self._silent:
                    sink.sendall(kind + struct.pack("!I", len(body) + 4) + body)
                self._fall_silent(message, pair)
        _cut(pair)

    def _is_cut(self, message: Message) -> bool:
        with self._lock:
            if not message.client.startswith(self._client):
                return False
            self.seen += 1
            self.seen_at = time.monotonic()
            if self._when is None or not self._when(message):
                return False
            self._when, self.fired = None, True
            return True

    def _fall_silent(self, message: Message, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            if self._silence is not None and self._silence(message):
                self._silence = None
                self._to_be_silent = pair
            if self._to_be_silent is pair and message.sender == "server" and message.kind == b"Z":
                self._to_be_silent, self.fired = None, True
                self._silent.append(pair)


def nth(sender: str, number: int) -> Callable[[Message], bool]:
    """For `cut`: at the message of that number from that side, counted from 1."""
    left = number

    def when(message: Message) -> bool:
        nonlocal left
        left -= message.sender == sender
        return left == 0

    return when


def nth_commit(number: int) -> Callable[[Message], bool]:
    """For `cut`: at the answer to the COMMIT of that number, counted from 1."""
    left = number

    def when(message: Message) -> bool:
        nonlocal left
        left -= message.ends_transaction
        return left == 0

    return when


def _messages(source: socket.socket, *, started: bool) -> Iterator[tuple[bytes, bytes]]:
    with source.makefile("rb") as stream:
        while True:
            kind = stream.read(1) if started else b""
            length = stream.read(4)
            if len(length) < 4:
                return
            body = stream.read(struct.unpack("!I", length)[0] - 4)
            started = True
            yield kind, body


def _cut(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
