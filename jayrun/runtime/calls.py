"""Calling user code: what it takes to await it, to forget it, and to write down how it failed."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import threading
import traceback
from collections.abc import Callable
from typing import Any

from jayrun.runtime.work import Invocation


def collect_garbage() -> None:
    """Collect in a thread of its own: Ctrl-C that hits a finalizer run by the main thread would be lost."""
    collector = threading.Thread(target=gc.collect, name="jayrun-collect", daemon=True)
    collector.start()
    collector.join()


def called(function: Callable[[], Any], invocation: Invocation) -> Any:
    """The result of `function`, awaited if it is a coroutine function."""
    if not inspect.iscoroutinefunction(function):
        return function()

    async def main() -> Any:
        invocation.main_task = asyncio.current_task()
        return await function()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    # The caller runs in an event loop already, which cannot run a second one: a thread of its own can.
    outcome: list[Any] = []
    context = contextvars.copy_context()

    def in_thread() -> None:
        try:
            outcome.extend((True, context.run(asyncio.run, main())))
        except BaseException as error:  # handed to the thread that waits for this one
            outcome.extend((False, error))

    thread = threading.Thread(target=in_thread, name="jayrun-async")
    thread.start()
    thread.join()
    succeeded, value = outcome
    if not succeeded:
        raise value
    return value


def stored(error: BaseException) -> dict[str, object]:
    """`error` as the book keeps it."""
    text = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": str(error), "traceback": text[-20_000:]}
