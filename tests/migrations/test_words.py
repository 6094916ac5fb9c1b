"""The words of states, kinds and reasons are said twice, in `jayrun.domain` and in the book; here they are compared."""

from __future__ import annotations

import re
from enum import StrEnum
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.errors import CheckViolation, IntegrityConstraintViolation

from jayrun.domain.devices import Backend, Device, DeviceState
from jayrun.domain.lifecycle import EXECUTION_MOVES, TERMINAL, EndReason, EventKind, ExecutionState

Sql = psycopg.Connection[tuple[object, ...]]

ACCELERATORS = set(Device) - {Device.CPU}


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("executions.state", set(ExecutionState)),
        ("devices.state", set(DeviceState)),
        ("devices.kind", ACCELERATORS),
        ("devices.backends", set(Backend)),
        ("placement_requests.device", ACCELERATORS),
        ("placement_requests.backend", set(Backend)),
        ("leases.end_reason", set(EndReason)),
        ("lease_holders.end_reason", set(EndReason)),
        ("lease_events.kind", set(EventKind)),
    ],
)
def test_the_check_of_a_column_has_the_words_of_the_code(sql: Sql, column: str, words: set[StrEnum]) -> None:
    table, name = column.split(".")
    (check,) = sql.execute(
        """
        SELECT pg_get_constraintdef(c.oid) FROM pg_constraint c
        JOIN pg_attribute a ON a.attrelid = c.conrelid AND c.conkey = ARRAY[a.attnum]
        WHERE c.contype = 'c' AND c.conrelid = ('jayrun.' || %s)::regclass AND a.attname = %s
        """,
        (table, name),
    ).fetchall()
    assert set(re.findall(r"'(\w+)'", str(check[0]))) == words


def test_states_move_as_the_code_says(sql: Sql) -> None:
    meant = {(state, after) for state, following in EXECUTION_MOVES.items() for after in following}
    still = {(state, state) for state in ExecutionState}
    assert {(state, after) for state in ExecutionState for after in ExecutionState if moves(sql, state, after)} == (
        meant | still
    )


def test_an_execution_ends_in_the_states_that_the_code_calls_terminal(sql: Sql) -> None:
    for state in ExecutionState:
        add_execution(sql, state)
        with pytest.raises(CheckViolation, match="executions_check"):
            sql.execute(
                "UPDATE jayrun.executions SET ended_at = CASE WHEN ended_at IS NULL THEN clock_timestamp() END"
                " WHERE state = %s",
                (state,),
            )


def add_execution(sql: Sql, state: ExecutionState) -> UUID:
    execution_id = uuid4()
    sql.execute(
        """
        WITH host AS (INSERT INTO jayrun.hosts (identity, name, boot_id) VALUES (%(id)s, 'host', 'boot') RETURNING id),
             holder AS (
                 INSERT INTO jayrun.holders (id, host_id, boot_id, pid_namespace, pid, start_ticks, user_name, role)
                 SELECT %(id)s, id, 'boot', 1, 1, 1, 'user', 'runtime' FROM host)
        INSERT INTO jayrun.executions (id, unit_id, holder_id, kind, name, shape, state, waiting_since, ended_at)
        VALUES (%(id)s, %(id)s, %(id)s, 'operator', 'by hand', 'any', %(state)s,
                CASE WHEN %(state)s = 'waiting' THEN clock_timestamp() END,
                CASE WHEN %(terminal)s THEN clock_timestamp() END)
        """,
        {"id": execution_id, "state": state, "terminal": state in TERMINAL},
    )
    return execution_id


def moves(sql: Sql, state: ExecutionState, after: ExecutionState) -> bool:
    """Whether the book lets an execution go from `state` to `after`."""
    execution_id = add_execution(sql, state)
    try:
        sql.execute(
            """
            UPDATE jayrun.executions SET state = %(state)s,
                waiting_since = CASE WHEN %(state)s = 'waiting' THEN clock_timestamp() END,
                ended_at = CASE WHEN %(terminal)s THEN clock_timestamp() END
            WHERE id = %(id)s
            """,
            {"id": execution_id, "state": after, "terminal": after in TERMINAL},
        )
    except IntegrityConstraintViolation as refusal:
        if refusal.diag.constraint_name != "executions_moves":
            raise
        return False
    return True
