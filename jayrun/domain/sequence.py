"""The recorded sequence: the same requests on every invocation, and the fingerprint by which waiters are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from itertools import zip_longest

from jayrun.domain.requests import Request
from jayrun.domain.visible import Visible, mask_text
from jayrun.errors import RequestSequenceChanged


def check_next(recorded: Sequence[Request], issued: Sequence[Request], request: Request) -> None:
    """Refuse `request`, asked after `issued`, when another one was recorded at its place.

    What goes beyond the recorded sequence is new and fine. Raises RequestSequenceChanged.
    """
    position = len(issued)
    if position < len(recorded) and recorded[position] != request:
        raise RequestSequenceChanged(
            f"request {position + 1} of this invocation is not the recorded one\n"
            + _side_by_side(recorded, (*issued, request), ended=False)
        )


def check_complete(recorded: Sequence[Request], issued: Sequence[Request]) -> None:
    """Refuse an invocation that returned before it had issued all that was recorded; raises RequestSequenceChanged."""
    if len(issued) < len(recorded):
        raise RequestSequenceChanged(
            f"this invocation returned after {len(issued)} of {len(recorded)} recorded requests\n"
            + _side_by_side(recorded, issued, ended=True)
        )


def shape_of(
    hosts: Sequence[int],
    requests: Sequence[Request],
    operator: str | None = None,
    visible: Visible | None = None,
) -> str:
    """A short digest, the same in every process, of what decides whether a waiter can be served.

    Equal for equal candidate hosts, equal requests, one operator, and masks that leave the same to be seen for them
    (`visible`, of the process that waits; one with an operator waits for any worker).
    """
    facts: list[object] = [list(hosts), [request.to_json() for request in requests]]
    if operator is not None:
        facts.append(operator)
    elif mask := mask_text(visible, [request.backend for request in requests]):
        facts.append(mask)
    text = json.dumps(facts, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=12).hexdigest()


def _side_by_side(recorded: Sequence[Request], issued: Sequence[Request], *, ended: bool) -> str:
    missing = "(none: it returned)" if ended else "(not reached)"
    rows = [("recorded", "issued now", "")]
    for before, now in zip_longest(recorded, issued):
        left = before.describe() if before else "(none)"
        right = now.describe() if now else missing
        # A request not reached yet is no difference; one that will never come is.
        differs = before != now and (now is not None or ended)
        rows.append((left, right, "  <-- differs" if differs else ""))
    width = max(len(left) for left, _, _ in rows)
    numbers = ["   ", *(f"{number:>3}" for number in range(1, len(rows)))]
    return "\n".join(
        f"{number}  {left:<{width}}  {right}{mark}" for number, (left, right, mark) in zip(numbers, rows, strict=True)
    )
