"""The views for people and programs: their names and columns stay, and they show what the tables say."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest

GIGABYTE = 10**9
Sql = psycopg.Connection[tuple[Any, ...]]

COLUMNS = {
    "capacity": (
        "host device_id device backends device_uuid name state exclusive_only capacity_bytes reserved_bytes free_bytes"
        " leases exclusively_leased host_id device_key withheld_bytes withheld_for ignore_bytes ignore_commands"
        " fault parent_uuid declared total_bytes reserve_bytes pci_bus_id island"
    ),
    "audit": (
        "host device device_id finding used_bytes leased_bytes pid user command lease_id detail since lasts observed_at"
        " age stale host_id device_key"
    ),
    "leases": (
        "id epoch host device_ids memory_bytes exclusive execution kind execution_id pid user label command granted_at"
        " seen_at age holders host_id"
    ),
    "queue": (
        "position execution_id execution kind host priority asks reason bypassed dormant pid user label waiting_since"
        " waiting host_id"
    ),
    "hosts": ("host identity state seen_at age devices leases holders boot_id registered_at forgotten_at host_id"),
    "holders": (
        "id host pid user database_user label command role state since seen_at age leases memory_bytes pid_namespace"
        " boot_id host_id"
    ),
    "violations": "rule subject detail",
}

# Two hosts. On host 1 a GPU of 10 GB with 6 GB leased to two processes, an exclusively leased one of 20 GB, a draining
# one, and a TPU; on host 2 a GPU. Four units wait on host 1, one of them with a set-up, and one on host 2.
SITUATION = """
CREATE FUNCTION pg_temp.key(n integer) RETURNS uuid IMMUTABLE LANGUAGE sql AS $$ SELECT lpad(n::text, 32, '0')::uuid $$;
INSERT INTO jayrun.hosts (id, identity, name, boot_id) OVERRIDING SYSTEM VALUE
VALUES (1, 'one', 'one', 'b'), (2, 'two', 'two', 'b');
INSERT INTO jayrun.devices (id, host_id, host_index, kind, backends, device_uuid, name, capacity_bytes, state)
OVERRIDING SYSTEM VALUE VALUES
    (1, 1, 0, 'gpu', '{cuda}', 'GPU-a', 'A', 10e9, 'online'),
    (2, 1, 1, 'gpu', '{cuda,opencl}', NULL, '', 20e9, 'online'),
    (3, 1, 2, 'gpu', '{cuda}', NULL, '', 10e9, 'draining'), (4, 1, 0, 'tpu', '{xla}', NULL, '', 10e9, 'online'),
    (5, 2, 0, 'gpu', '{cuda}', NULL, '', 10e9, 'online');
INSERT INTO jayrun.holders (id, host_id, boot_id, pid_namespace, pid, start_ticks, user_name, label, command, role)
VALUES (pg_temp.key(1), 1, 'b', 1, 101, 1, 'ann', 'first', 'train.py', 'runtime'),
       (pg_temp.key(2), 1, 'b', 1, 102, 1, 'bob', '', 'serve.py', 'runtime'),
       (pg_temp.key(3), 2, 'b', 1, 103, 1, 'eve', '', 'else.py', 'runtime');
INSERT INTO jayrun.executions (id, kind, name, unit_id, host_id, holder_id, state, priority, age, shape, waiting_since,
                               dormant, bypassed)
SELECT pg_temp.key(id), kind, name, pg_temp.key(unit), host, pg_temp.key(holder), state, priority, id, shape,
       CASE state WHEN 'waiting' THEN clock_timestamp() END, dormant, bypassed
FROM (VALUES
    (1, 'operator', 'Train',   1, 1, 1, 'running', 0, NULL, false, 0),
    (2, 'command',  'serve',   2, 1, 2, 'running', 0, NULL, false, 0),
    (3, 'operator', 'Slow',    3, 1, 1, 'waiting', 0, 'a',  false, 2),
    (4, 'resource', 'Model',   5, 1, 2, 'waiting', 0, NULL, false, 0),
    (5, 'operator', 'Urgent',  5, 1, 2, 'waiting', 7, 'b',  false, 0),
    (6, 'command',  'stopped', 6, 1, 1, 'waiting', 0, 'a',  true,  0),
    (7, 'operator', 'Foreign', 7, 1, 1, 'waiting', 0, 'c',  false, 0),
    (8, 'operator', 'Else',    8, 2, 3, 'waiting', 0, 'd',  false, 0)
) AS e (id, kind, name, unit, host, holder, state, priority, shape, dormant, bypassed);
INSERT INTO jayrun.placement_requests
SELECT pg_temp.key(id), position, device, backend, is_group, low, high, false, of_group, each, exclusive, device_id
FROM (VALUES
    (1, 0, 'gpu', 'cuda', false, 1, 1,    0,    6e9, false, NULL),
    (2, 0, 'gpu', 'cuda', true,  1, 2,    0,      0, true,  NULL),
    (3, 0, 'gpu', 'cuda', false, 1, 1,    0,    5e9, false, 0),
    (4, 0, 'tpu', 'xla',  false, 1, 1,    0,      0, true,  NULL),
    (5, 0, 'gpu', 'cuda', true,  2, 3, 30e9,  1.5e9, false, NULL),
    (5, 1, 'gpu', 'opencl', true, 2, 2,   0,      0, true,  NULL),
    (6, 0, 'gpu', 'cuda', false, 1, 1,    0,    5e9, false, 0),
    (7, 0, 'gpu', 'rocm', false, 1, 1,    0, 333333, false, NULL),
    (8, 0, 'gpu', 'cuda', false, 1, 1,    0,    5e9, false, NULL)
) AS r (id, position, device, backend, is_group, low, high, of_group, each, exclusive, device_id);
INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id)
VALUES (pg_temp.key(1), pg_temp.key(1), 0, 1, 1), (pg_temp.key(2), pg_temp.key(2), 0, 1, 1);
INSERT INTO jayrun.lease_holders (lease_id, holder_id, since) VALUES
    (pg_temp.key(1), pg_temp.key(2), '2001-01-02'), (pg_temp.key(1), pg_temp.key(1), '2001-01-01'),
    (pg_temp.key(2), pg_temp.key(2), '2001-01-02');
INSERT INTO jayrun.lease_shares (lease_id, device_id, memory_bytes, exclusive)
VALUES (pg_temp.key(1), 1, 6e9, false), (pg_temp.key(2), 2, 0, true);
"""


@pytest.fixture
def hand(sql: Sql) -> Sql:
    """A connection in autocommit to a book with the situation above."""
    sql.execute(SITUATION)
    return sql


@pytest.mark.parametrize("view", COLUMNS)
def test_columns_stay(hand: Sql, view: str) -> None:
    shown = hand.execute(f"SELECT * FROM jayrun_audit.{view}").description
    assert shown is not None
    assert [column.name for column in shown] == COLUMNS[view].split()


def test_every_view_says_what_it_is(sql: Sql) -> None:
    silent = sql.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = 'jayrun_audit'::regnamespace AND relkind = 'v'"
        " AND coalesce(obj_description(oid, 'pg_class'), '') = ''"
    ).fetchall()
    assert silent == []


def test_capacity(hand: Sql) -> None:
    hand.execute("UPDATE jayrun.devices SET capacity_bytes = 5e9 WHERE id = 1")  # below what is in use
    hand.execute("UPDATE jayrun.devices SET removed_at = clock_timestamp() WHERE id = 4")
    rows = hand.execute(
        "SELECT host, device, device_id, device_uuid, state, capacity_bytes, reserved_bytes, free_bytes, leases,"
        " exclusively_leased FROM jayrun_audit.capacity ORDER BY device_key"
    ).fetchall()
    assert rows == [
        ("one", "gpu", 0, "GPU-a", "online", 5 * GIGABYTE, 6 * GIGABYTE, 0, 1, False),
        ("one", "gpu", 1, None, "online", 20 * GIGABYTE, 0, 0, 1, True),
        ("one", "gpu", 2, None, "draining", 10 * GIGABYTE, 0, 0, 0, False),
        ("two", "gpu", 0, None, "online", 10 * GIGABYTE, 0, 10 * GIGABYTE, 0, False),
    ]


SILENT = "seen_at = clock_timestamp() - interval '31 s'"


def test_the_devices_of_a_silent_host_are_offline(hand: Sql) -> None:
    hand.execute(f"UPDATE jayrun.hosts SET {SILENT} WHERE id = 1")
    rows = hand.execute(
        "SELECT host, state, free_bytes, leases FROM jayrun_audit.capacity ORDER BY device_key"
    ).fetchall()
    assert rows == [
        *(("one", "offline", 0, leases) for leases in (1, 1, 0, 0)),
        ("two", "online", 10 * GIGABYTE, 0),
    ]
    (reason,) = hand.execute("SELECT reason FROM jayrun_audit.queue WHERE execution = 'Slow'").fetchall()
    assert reason == ("gpu 0: offline",)


def test_hosts(hand: Sql) -> None:
    query = (
        "SELECT host, identity, state, age >= interval '0', devices, leases, holders, boot_id FROM jayrun_audit.hosts"
        " ORDER BY host_id"
    )
    assert hand.execute(query).fetchall() == [
        ("one", "one", "online", True, 4, 2, 2, "b"),
        ("two", "two", "online", True, 1, 0, 1, "b"),
    ]
    hand.execute(f"UPDATE jayrun.hosts SET {SILENT}")
    hand.execute("UPDATE jayrun.hosts SET forgotten_at = clock_timestamp() WHERE id = 2")
    hand.execute("UPDATE jayrun.devices SET removed_at = clock_timestamp() WHERE id = 5")
    assert [row[2:6] for row in hand.execute(query).fetchall()] == [("silent", True, 4, 2), ("forgotten", True, 0, 0)]


def test_holders(hand: Sql) -> None:
    query = (
        'SELECT id, host, pid, "user", label, command, role, state, leases, memory_bytes FROM jayrun_audit.holders'
        " ORDER BY pid"
    )
    hand.execute(f"UPDATE jayrun.holders SET {SILENT} WHERE id = %s", (UUID(int=2),))
    assert hand.execute(query).fetchall() == [
        (UUID(int=1), "one", 101, "ann", "first", "train.py", "runtime", "alive", 1, 6 * GIGABYTE),
        (UUID(int=2), "one", 102, "bob", "", "serve.py", "runtime", "silent", 2, 6 * GIGABYTE),
        (UUID(int=3), "two", 103, "eve", "", "else.py", "runtime", "alive", 0, 0),
    ]
    hand.execute(
        "UPDATE jayrun.holders SET state = 'ended', ended_at = clock_timestamp(), end_reason = 'dead' WHERE id = %s",
        (UUID(int=3),),
    )
    assert len(hand.execute(query).fetchall()) == 2


def test_leases(hand: Sql) -> None:
    query = (
        'SELECT id, host, device_ids, memory_bytes, exclusive, execution, kind, pid, "user", label, command, holders,'
        " age >= interval '0', epoch FROM jayrun_audit.leases ORDER BY epoch"
    )
    rows = hand.execute(query).fetchall()
    assert [row[:-1] for row in rows] == [
        (UUID(int=1), "one", [0], 6 * GIGABYTE, False, "Train", "operator", 101, "ann", "first", "train.py", 2, True),
        (UUID(int=2), "one", [1], 0, True, "serve", "command", 102, "bob", "", "serve.py", 1, True),
    ]
    assert rows[0][-1] < rows[1][-1]
    hand.execute(
        "UPDATE jayrun.lease_holders SET ended_at = clock_timestamp(), end_reason = 'released' WHERE holder_id = %s",
        (UUID(int=2),),
    )
    (left,) = hand.execute(query).fetchall()
    assert (left[0], left[11]) == (UUID(int=1), 1)


def test_queue(hand: Sql) -> None:
    rows = hand.execute(
        'SELECT position, execution, kind, priority, pid, "user", bypassed, asks, reason FROM jayrun_audit.queue'
        " ORDER BY host, position"
    ).fetchall()
    free = "gpu 0: 4 of 10 GB free, 1 lease"
    every = f"{free}; gpu 1: exclusively leased; gpu 2: draining; tpu 0: 10 of 10 GB free, 0 leases"
    whole = "xla exclusive + 2-3 x cuda 1.5 GB each 30 GB in all + 2 x opencl exclusive"
    assert rows == [
        (1, "Urgent", "operator", 7, 102, "bob", 0, whole, every),
        (2, "Slow", "operator", 0, 101, "ann", 2, "cuda:0 5 GB", free),
        (3, "stopped", "command", 0, 101, "ann", 0, "cuda:0 5 GB", "its process does not answer"),
        (4, "Foreign", "operator", 0, 101, "ann", 0, "rocm 0.000333333 GB", "no such device is declared"),
        (1, "Else", "operator", 0, 103, "eve", 0, "cuda 5 GB", "gpu 0: 10 of 10 GB free, 0 leases"),
    ]


# --- what is always empty --------------------------------------------------------------------------------------------


def violations(sql: Sql) -> dict[tuple[str, str], str]:
    """What is broken, by rule and subject."""
    return {(row[0], row[1]): row[2] for row in sql.execute("SELECT * FROM jayrun_audit.violations").fetchall()}


def test_what_is_allowed_is_no_violation(hand: Sql) -> None:
    assert violations(hand) == {}
    hand.execute("UPDATE jayrun.devices SET capacity_bytes = 1, exclusive_only = true, state = 'draining' WHERE id = 1")
    assert violations(hand) == {}
    hand.execute("UPDATE jayrun.lease_holders SET ended_at = clock_timestamp(), end_reason = 'released'")
    assert violations(hand) == {}
    hand.execute("UPDATE jayrun.lease_shares SET folded_at = clock_timestamp()")
    assert violations(hand) == {}


ONE, TWO = str(UUID(int=1)), str(UUID(int=2))
COUNTERS = "device counters differ from its shares"
ENDED = "ended_at = clock_timestamp(), end_reason ="


@pytest.mark.parametrize(
    ("table", "broken_by", "found"),
    [
        ("devices", "SET reserved_bytes = 1 WHERE id = 5", {(COUNTERS, "5")}),
        ("devices", "SET share_count = 0 WHERE id = 1", {(COUNTERS, "1")}),
        ("devices", "SET exclusive_count = 0 WHERE id = 2", {(COUNTERS, "2")}),
        (
            "lease_shares",
            "SET device_id = 1 WHERE exclusive",
            {(COUNTERS, "1"), (COUNTERS, "2"), ("exclusive share beside another", "1")},
        ),
        (
            "leases",
            f"SET holder_count = 0, {ENDED} 'released' WHERE execution_id = '{TWO}'",
            {("live share of an ended lease", TWO)},
        ),
        (
            "lease_holders",
            f"SET {ENDED} 'released' WHERE lease_id = '{TWO}'",
            {("live lease that nobody holds", TWO)},
        ),
        (
            "holders",
            f"SET state = 'ended', {ENDED} 'dead' WHERE id = '{ONE}'",
            {("lease held by a holder that has ended", ONE)},
        ),
        ("leases", f"SET host_id = 2 WHERE id = '{TWO}'", {("lease on devices of another host", TWO)}),
        (
            "placement_requests",
            f"SET min_devices = 2 WHERE execution_id = '{TWO}'",
            {("group lease with a wrong number of devices", TWO)},
        ),
    ],
)
def test_what_is_broken_is_found(hand: Sql, table: str, broken_by: str, found: set[tuple[str, str]]) -> None:
    hand.execute("SET session_replication_role = replica")  # the triggers look away
    hand.execute(f"UPDATE jayrun.{table} {broken_by}")
    seen = violations(hand)
    assert set(seen) == found
    assert all(seen.values())  # each with a word on what is wrong
