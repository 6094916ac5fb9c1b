"""A `Ticket`: the caller's end of a submitted execution."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from jayrun import kernel
from jayrun.domain.explanation import Explanation
from jayrun.domain.lifecycle import ExecutionState
from jayrun.errors import ExecutionFailed, PlacementCancelled
from jayrun.store import submissions
from jayrun.store.explain import explain
from jayrun.store.submissions import Look
from jayrun.store.transactions import Book


class Ticket:
    """A submitted execution, by its `id`: it can be asked for, waited for and cancelled from any process."""

    def __init__(self, book: Book, execution_id: UUID) -> None:
        self._book = book
        self.id = execution_id

    def __repr__(self) -> str:
        return f"Ticket({self.id})"

    @property
    def state(self) -> ExecutionState:
        """Where it stands now. Raises `UnknownId` when the book does not have it."""
        return self.look().state

    def look(self) -> Look:
        """All that the book says about it now. Raises `UnknownId`."""
        return submissions.look(self._book, self.id)

    def result(self, timeout: float | None = None) -> Any:
        """The JSON value that it returned, waiting for the end up to `timeout` seconds (None: for ever).

        None when it returned something else; `look().result_kind` names that. Raises TimeoutError, `ExecutionFailed`
        with what the book has of the failure, `PlacementCancelled`, and `UnknownId`.
        """
        found = self.wait(timeout)
        if not found.has_ended:
            raise TimeoutError(
                f"execution {self.id} ({found.name}) is still {found.state} after {timeout:g} s; why() tells more"
            )
        failure = found.failure or {}
        if found.state is ExecutionState.FAILED:
            told = f"{failure.get('type', 'it')}: {failure.get('message', 'failed')}"
            raise ExecutionFailed(f"execution {self.id} ({found.name}) failed: {told}", failure)
        if found.state is ExecutionState.CANCELLED:
            raise PlacementCancelled(f"execution {self.id} ({found.name}): {failure.get('message', 'was cancelled')}")
        return found.result

    def wait(self, timeout: float | None = None) -> Look:
        """How it stands once it has ended, or after `timeout` seconds (None: for ever). Raises `UnknownId`."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        found = self.look()
        if found.has_ended:
            return found
        tick_seconds = self._book.tick_seconds()
        with self._book.listen(str(self.id)) as listener:
            submissions.watch(self._book, self.id)
            while True:
                listener.open()  # again if it was lost; the look comes after it
                if (found := self.look()).has_ended:
                    break
                until = time.monotonic() + tick_seconds
                if give_up_at is not None:
                    if time.monotonic() >= give_up_at:
                        break
                    until = min(until, give_up_at)
                listener.wait(until - time.monotonic())
        return found

    def why(self) -> Explanation:
        """What it waits for, who holds that, and whose end would let it run; `text()` says it for people.

        Raises `UnknownId`.
        """
        return explain(self._book, self.id)

    def cancel(self) -> ExecutionState:
        """End it if it waits for anything, ask it to end if it runs; returns where it stands then.

        What runs ends at its next request; a worker that goes on is ended after the book's `cancel_seconds`. Raises
        `UnknownId`.
        """
        return submissions.cancel(self._book, self.id, who=kernel.user_name()).state
