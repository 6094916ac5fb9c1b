"""procrastinate's empty task: `procrastinate --app benchmarks.rival.app worker`. Its database comes as
jayrun's does."""

from __future__ import annotations

from procrastinate import App, PsycopgConnector

from jayrun.settings import Settings


async def nothing() -> None:
    """A coroutine function, which procrastinate runs without a thread, and so the quickest."""


app = App(connector=PsycopgConnector(conninfo=Settings.load().database_url or ""))
empty = app.task(name="empty")(nothing)
