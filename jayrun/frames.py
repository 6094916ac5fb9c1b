"""What exceptions keep alive: the local variables of the frames that they went through."""

from __future__ import annotations

import traceback


def clear_frames(error: BaseException, *, around: BaseException | None) -> None:
    """Drop the local variables of the frames that `error`, its causes and contexts went through, up to `around`: what
    the caller was handling before, which is none of ours.

    Whoever keeps the exception then keeps its text and line numbers, and nothing that was in a variable.
    """
    seen = {id(around)}
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
