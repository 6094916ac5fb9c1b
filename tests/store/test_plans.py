"""The hot statements read few rows, whatever the planner knew of the tables when it made the plans."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import psycopg
import pytest
from fleet import Scene, cuda, gpus, scene

from jayrun import probes
from jayrun.domain.lifecycle import ExecutionState
from jayrun.store import admission, at_once, claims, executions, holders, leases
from jayrun.store.claims import Done, Taken
from jayrun.store.leases import Finished, Lease
from jayrun.store.submissions import submission, submit
from jayrun.store.transactions import Book

# As many as that end, and as many that wait behind the ones of the test, for the same.
MANY = 2_000
GROWTH = f"""
INSERT INTO jayrun.executions (id, unit_id, kind, name, host_id, holder_id, state)
SELECT id, id, 'operator', 'ended', %(host)s, %(holder)s, 'running'
FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, {MANY})) n;
INSERT INTO jayrun.placement_requests
SELECT id, 0, 'gpu', 'cuda', false, 1, 1, false, 0, 1, false FROM jayrun.executions WHERE name = 'ended';
INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id)
SELECT id, id, 0, 1, host_id FROM jayrun.executions WHERE name = 'ended';
INSERT INTO jayrun.lease_holders (lease_id, holder_id)
SELECT id, holder_id FROM jayrun.executions WHERE name = 'ended';
UPDATE jayrun.lease_holders SET ended_at = clock_timestamp(), end_reason = 'released'
WHERE lease_id IN (SELECT id FROM jayrun.executions WHERE name = 'ended');
UPDATE jayrun.executions SET state = 'succeeded', ended_at = clock_timestamp() WHERE name = 'ended';
WITH live AS (SELECT * FROM jayrun.executions WHERE state = 'waiting'),
new AS (SELECT gen_random_uuid() AS id FROM generate_series(1, {MANY})),
waiting AS (
    INSERT INTO jayrun.executions (id, unit_id, kind, name, host_id, holder_id, state, shape, waiting_since)
    SELECT new.id, new.id, kind, name, host_id, holder_id, state, shape, waiting_since FROM live CROSS JOIN new)
INSERT INTO jayrun.placement_requests
SELECT new.id, position, device, backend, is_group, min_devices, max_devices, prefer_max_devices, group_bytes,
       per_device_bytes, exclusive, device_id
FROM jayrun.placement_requests q JOIN live ON live.id = q.execution_id CROSS JOIN new;
"""
READ = "SELECT relname, seq_tup_read, coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables WHERE schemaname = 'jayrun'"
FLUSH = "SELECT true FROM (SELECT pg_stat_force_next_flush()) s"


def read(sql: psycopg.Connection) -> Counter[str]:
    """Rows read by scans so far, by table and by whether the whole table was scanned."""
    rows = sql.execute(READ).fetchall()
    whole = Counter({f"{table} (whole)": whole for table, whole, _ in rows})
    return whole + Counter({table: by_index for table, _, by_index in rows})


def hand_over(stage: Scene, lease: Lease, waiting: UUID) -> Lease:
    """What a process that ends and one that waits do."""
    ended = [Finished(lease.execution_id, ExecutionState.SUCCEEDED)]
    settling = leases.settling(stage.holder.id, released=[(lease.id, lease.epoch)], finished=ended)
    assert admission.combine(stage.book, stage.host_id, settling=settling) == 1
    return executions.attend(stage.book, [waiting]).claimed[waiting].leases[0]


@pytest.mark.parametrize("analysed", ["never", "while small", "when grown"])
def test_a_hand_over_reads_few_rows(book: Book, sql: psycopg.Connection, analysed: str) -> None:
    stage = scene(book, gpus(1))
    lease = stage.granted(cuda(24))
    if analysed == "while small":
        sql.execute("VACUUM ANALYZE")
    for _ in range(10):  # each function has its lasting plans
        lease = hand_over(stage, lease, stage.reserve(cuda(24), priority=1)[0])
    waiting, _ = stage.reserve(cuda(24), priority=1)
    values = {"host": stage.host_id, "holder": stage.holder.id}
    psycopg.ClientCursor(sql).execute(GROWTH, values)
    assert len(sql.execute("SELECT FROM jayrun.executions WHERE state = 'waiting'").fetchall()) == MANY + 1
    if analysed == "when grown":
        sql.execute("ANALYZE")
    book.value(FLUSH)
    before = read(sql)
    hand_over(stage, lease, waiting)
    book.value(FLUSH)
    rows = read(sql) - before
    assert rows.total() > 10
    assert max(rows.values()) < 100, rows


@pytest.mark.parametrize("analysed", ["never", "while small", "when grown"])
def test_an_ask_that_nobody_stands_before_reads_few_rows(book: Book, sql: psycopg.Connection, analysed: str) -> None:
    stage = scene(book, gpus(1))
    if analysed == "while small":
        sql.execute("VACUUM ANALYZE")
    reserved = []

    def cycle() -> None:
        lease = stage.granted(cuda(24))
        leases.release(book, stage.host_id, stage.holder.id, [(lease.id, lease.epoch)])

    with probes.arm("reserve.loaded", lambda: reserved.append("behind the gate")):
        for steady in (False, True):  # with a look before the gate, and without
            for _ in range(10):
                book.views[stage.holder.id] = at_once.View() if not steady else book.views[stage.holder.id]
                cycle()
        psycopg.ClientCursor(sql).execute(GROWTH, {"host": stage.host_id, "holder": stage.holder.id})
        if analysed == "when grown":
            sql.execute("ANALYZE")
        for steady in (True, False):
            if not steady:
                book.views[stage.holder.id] = at_once.View()
            book.value(FLUSH)
            before = read(sql)
            cycle()
            book.value(FLUSH)
            rows = read(sql) - before
            assert rows.total() > 10
            assert max(rows.values()) < 100, (steady, rows)
    assert reserved == []


READY = f"""
INSERT INTO jayrun.executions (id, unit_id, kind, name, detached, state, inputs, ended_at)
SELECT id, id, 'operator', 'Test', true, state, '{{}}', CASE WHEN state = 'cancelled' THEN clock_timestamp() END
FROM (SELECT gen_random_uuid() AS id, state
      FROM generate_series(1, {MANY}), unnest(ARRAY['ready', 'cancelled']) state) n
"""


def end_and_take(book: Book, worker: UUID, last: Taken) -> Taken:
    done = Done(id=last.id, claim=last.claim, state=ExecutionState.SUCCEEDED, result="1", result_kind="json")
    following = claims.take(book, worker, done)
    assert following.finished
    assert following.taken is not None
    return following.taken


@pytest.mark.parametrize("analysed", ["never", "while small", "when grown"])
def test_a_worker_reads_few_rows(book: Book, sql: psycopg.Connection, analysed: str) -> None:
    stage = scene(book, gpus(1))
    worker = holders.register(book, stage.host_id, role="worker").id
    claims.accept(book, worker, ["Test"])
    wanted = submission("Test", {})
    for _ in range(12):
        submit(book, wanted)
    if analysed == "while small":
        sql.execute("VACUUM ANALYZE")
    taken = claims.take(book, worker).taken
    for _ in range(10):
        assert taken is not None
        taken = end_and_take(book, worker, taken)
    assert taken is not None
    sql.execute(READY)
    if analysed == "when grown":
        sql.execute("ANALYZE")
    book.value(FLUSH)
    before = read(sql)
    end_and_take(book, worker, taken)
    book.value(FLUSH)
    rows = read(sql) - before
    assert rows.total() > 3
    assert max(rows.values()) < 100, rows
