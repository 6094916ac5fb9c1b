"""An outage of the book, as a process tells people of it: one line when it begins, one when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable


class Outage:
    """Whether the book is away, as far as one thread knows; `say` gets the lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since: float | None = None

    @property
    def lasts(self) -> bool:
        return self._since is not None

    def began(self, error: BaseException, meanwhile: str) -> None:
        """The book did not answer; does nothing when that was said already. `meanwhile` is what becomes of things."""
        if self._since is None:
            self._since = time.monotonic()
            # As text: a log record that somebody keeps would keep the error's frames, and with them data and leases.
            self._say(f"the book is out of reach; {meanwhile}: {str(error).partition(chr(10))[0]}")

    def ended(self, then: str = "") -> None:
        """The book has answered; does nothing when it always did. `then` is what became of things."""
        if self._since is not None:
            seconds, self._since = time.monotonic() - self._since, None
            self._say(f"the book is back after {seconds:.0f} s{then and '; '}{then}")
