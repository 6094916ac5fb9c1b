"""A Runtime per test, with its service ended afterwards, so that no process-wide state goes from test to test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from fleet import MakeRuntime

from jayrun import Runtime
from jayrun.runtime import service


@pytest.fixture
def make_runtime(url: str, sql: psycopg.Connection) -> Iterator[MakeRuntime]:
    """Make Runtimes on the empty book, with a short tick; all are closed at the end."""
    sql.execute("UPDATE jayrun.settings SET tick_seconds = 0.2")
    made: list[Runtime] = []

    def make(**arguments: Any) -> Runtime:
        made.append(Runtime(url, **arguments))
        return made[-1]

    yield make
    for runtime in made:
        runtime._cancel_waiting("the test is over")  # a test that failed may still hold what others wait for
        runtime.close()
    ended = service._services.pop(url, None)
    if ended is not None:
        ended.stop()
