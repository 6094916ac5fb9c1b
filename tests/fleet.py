"""Small helpers that set a scene in the book."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

import psycopg
from processes import until

from jayrun import Runtime
from jayrun.domain.devices import Backend, Device, RuntimeDevice
from jayrun.domain.requests import Request
from jayrun.store import admission, devices, holders
from jayrun.store.admission import Ask, Execution, Granted, Member, Outcome
from jayrun.store.holders import Holder
from jayrun.store.ids import new_id
from jayrun.store.leases import Lease
from jayrun.store.transactions import Book

MakeRuntime = Callable[..., Runtime]

# Deleting history is refused to everyone; only a session that switches triggers off may empty the book between tests.
EMPTY = """
SET session_replication_role = replica;
DO $$ DECLARE t text; BEGIN
    FOR t IN SELECT format('DELETE FROM jayrun.%I', tablename) FROM pg_tables
             WHERE schemaname = 'jayrun' AND tablename NOT IN ('schema_revision', 'settings', 'gate')
    LOOP EXECUTE t; END LOOP;
END $$;
DELETE FROM jayrun.settings;
INSERT INTO jayrun.settings DEFAULT VALUES;
SET session_replication_role = origin;
"""


def let_silence_count(sql: psycopg.Connection) -> None:
    """As if the book had been in reach of everyone for an hour: who is silent is so by itself."""
    sql.execute("UPDATE jayrun.settings SET holder_ttl_seconds = 1.5, tick_seconds = 0.5")
    sql.execute("UPDATE jayrun.hosts SET watched_since = clock_timestamp() - interval '1 hour'")
    up = "SELECT clock_timestamp() - pg_postmaster_start_time() > interval '1.5 s'"
    until(lambda: sql.execute(up).fetchone() == (True,))


def gpus(count: int, memory_gb: float = 24) -> list[RuntimeDevice]:
    return [RuntimeDevice(Device.GPU, [Backend.CUDA], index, memory_gb) for index in range(count)]


def cuda(memory_gb: float, *, exclusive: bool = False, device_id: int | None = None) -> Request:
    return Request.single(
        device=Device.GPU, backend=Backend.CUDA, memory_gb=memory_gb, exclusive=exclusive, device_id=device_id
    )


def cuda_group(count: int, per_device_memory_gb: float, *, exclusive: bool = False) -> Request:
    return Request.of_group(
        device=Device.GPU,
        backend=Backend.CUDA,
        per_device_memory_gb=per_device_memory_gb,
        min_devices=count,
        max_devices=count,
        exclusive=exclusive,
    )


@dataclass
class Scene:
    """A host with devices, and this process as a holder, at the level of the store."""

    book: Book
    host_id: int
    holder: Holder

    def execution(self, *, priority: int = 0, holder: Holder | None = None) -> Execution:
        key = new_id()
        return Execution(
            id=key,
            kind="operator",
            name="Test",
            host_id=self.host_id,
            holder_id=(holder or self.holder).id,
            unit_id=key,
            priority=priority,
        )

    def ask(self, request: Request, *, execution: Execution | None = None, wait: bool = True, priority: int = 0) -> Ask:
        execution = execution or self.execution(priority=priority)
        return Ask(asker=Member(execution=execution, invocation=1, recorded=(request,)), position=0, wait=wait)

    def reserve(self, request: Request, *, wait: bool = True, priority: int = 0) -> tuple[UUID, Outcome]:
        ask = self.ask(request, wait=wait, priority=priority)
        return ask.asker.execution.id, admission.reserve(self.book, ask)

    def granted(self, request: Request) -> Lease:
        _, outcome = self.reserve(request)
        assert isinstance(outcome, Granted), outcome
        return outcome.lease


def scene(book: Book, declared: list[RuntimeDevice]) -> Scene:
    host_id = holders.attest_host(book, "test-host")
    devices.declare(book, host_id, declared)
    return Scene(book, host_id, holders.register(book, host_id, role="runtime"))
