"""Whoever ends several leases locks them in one order, so that two never wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from test_refusals import SITUATION, Sql, key, until, waits

from jayrun.store import executions, leases, reclaim

# Against the order of their keys, so that an index or a scan meets them the other way round.
BACKWARDS = SITUATION.replace("FROM jayrun.leases;", "FROM jayrun.leases ORDER BY id DESC;")
ALL = [key(number) for number in (4, 3, 2, 1)]

Act = Callable[[psycopg.Connection[Any]], object]


def leave(pg: psycopg.Connection[Any]) -> None:
    pg.execute(leases.settling(key(1), released=[(lease, epoch) for lease, epoch in epochs(pg)]))


def epochs(pg: psycopg.Connection[Any]) -> list[Any]:
    return pg.execute("SELECT id, epoch FROM jayrun.leases ORDER BY id DESC").fetchall()


def reclaimed(pg: psycopg.Connection[Any]) -> None:
    reclaim.end_holder(pg, key(1), reason="dead")


def returned(pg: psycopg.Connection[Any]) -> None:
    executions._return_leases(pg, [(lease, 1) for lease in ALL])


@pytest.mark.parametrize("act", [leave, reclaimed, returned])
def test_leases_are_left_in_the_order_of_their_keys(sql: Sql, url: str, act: Act) -> None:
    assert BACKWARDS != SITUATION
    sql.execute(BACKWARDS)
    with (
        psycopg.connect(url, autocommit=True) as acting,
        psycopg.connect(url, autocommit=True) as looking,
        ThreadPoolExecutor(1) as pool,
    ):
        with sql.transaction():
            sql.execute("SELECT FROM jayrun.lease_holders WHERE lease_id = %s FOR UPDATE", (key(2),))
            done = pool.submit(act, acting)
            until(lambda: waits(looking, acting))
            free = looking.execute("SELECT lease_id FROM jayrun.lease_holders FOR UPDATE SKIP LOCKED").fetchall()
            assert sorted(free) == [(key(3),), (key(4),)]
        done.result()
    assert sql.execute("SELECT FROM jayrun.lease_holders WHERE ended_at IS NULL").fetchall() == []
