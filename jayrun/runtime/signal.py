"""The internal signal that ends an invocation which has to wait. User code neither raises nor catches it."""

from __future__ import annotations

import traceback


class PlacementSignal(BaseException):
    """Unwinds an invocation whose request is parked.

    Derived from BaseException, so that `except Exception` and retry decorators let it pass. It carries nothing, so that
    a saved one keeps nothing alive.
    """

    def __init__(self) -> None:
        super().__init__("jayrun ends this invocation to wait for capacity; let it pass")


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of the frames that `error`, its causes and contexts went through.

    Whoever keeps an exception of an ended invocation keeps its text and line numbers, and none of its placements.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        pending += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            pending += each.exceptions
