"""The internal signal that ends an invocation which has to wait. User code neither raises nor catches it."""

from __future__ import annotations


class PlacementSignal(BaseException):
    """Unwinds an invocation whose request is parked.

    Derived from BaseException, so that `except Exception` and retry decorators let it pass. It carries nothing, so that
    a saved one keeps nothing alive.
    """

    def __init__(self) -> None:
        super().__init__("jayrun ends this invocation to wait for capacity; let it pass")
