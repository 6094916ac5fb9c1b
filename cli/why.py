"""`jayrun why`: where an execution stands, and what would have to happen for it to go on."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Annotated, assert_never

import typer

from jayrun.domain.devices import Share
from jayrun.domain.explanation import Active, Ended, Explanation, Ready, Waiting
from jayrun.domain.why import DeviceTerms, Held, HostTerms, Later, Never, Now, Outlook, Who
from jayrun.settings import Settings
from jayrun.store import audit
from jayrun.store.explain import explain

from .book import open_judged
from .options import AsJson
from .render import Row, to_json


def why(
    execution: Annotated[
        str, typer.Argument(metavar="ID", help="An execution's id, or four or more characters of it.")
    ],
    as_json: AsJson = False,
) -> None:
    """Say why an execution waits, and what would admit it.

    For each device what it lacks, the leases in the way and who holds them, and the fewest of them that would have to
    end. Of an execution that does not wait it says what it is doing or how it ended.
    """
    with closing(open_judged(Settings.load())) as book:
        found = explain(book, audit.find_execution(book, execution))
    typer.echo(to_json(_row(found)) if as_json else found.text())


def outlook_row(outlook: Outlook) -> Row:
    """An outlook by the same keys whatever it is; `answer` is now, after or never."""
    row: Row = {
        "answer": "never",
        "host": None,
        "shares": [],
        "reason": None,
        "fewest": None,
        "room": None,
        "before": [],
        "workers": None,
        "devices": [],
    }
    match outlook:
        case Now(name=host, plan=plan):
            return row | {
                "answer": "now",
                "host": host,
                "shares": [_share(share) for shares in plan for share in shares],
            }
        case Later() as later:
            workers = later.workers
            return row | {
                "answer": "after",
                "reason": None if workers is None or workers.idle else str(workers),
                "fewest": _leases(later.fewest),
                "room": _leases(later.room),
                "before": [_who(who) for who in later.before],
                "workers": None if workers is None else asdict(workers),
                "devices": [_device(terms, each) for terms in later.hosts for each in terms.devices],
            }
        case Never(reason):
            return row | {"reason": reason}
        case _:
            assert_never(outlook)


def _row(found: Explanation) -> Row:
    row: Row = {
        **_who(found.who),
        "kind": found.kind,
        "state": found.state,
        "priority": found.priority,
        "seconds": found.seconds,
        "failure": None if found.failure is None else asdict(found.failure),
    }
    match found.situation:
        case Waiting() as waits:
            return row | {
                "position": waits.position,
                "waiting": waits.waiting,
                "queue": waits.queue,
                "asks": [request.describe() for request in waits.requests],
                "dormant": waits.dormant,
                **outlook_row(waits.outlook),
            }
        case Ready() as ready:
            return row | asdict(ready) | {"reason": None if ready.workers.idle else str(ready.workers)}
        case Active() as active:
            return row | {
                "host": active.host,
                "leases": [_held(held) for held in active.leases],
                "cancelled_seconds": active.cancelled_seconds,
            }
        case Ended():
            return row
        case _:
            assert_never(found.situation)


def _device(terms: HostTerms, each: DeviceTerms) -> Row:
    device = each.device
    return {
        "host": terms.name,
        "device": device.kind,
        "device_id": device.host_index,
        "state": device.state,
        "capacity_bytes": device.capacity_bytes,
        "withheld_bytes": device.withheld_bytes,
        "free_bytes": max(device.free_bytes, 0),
        "fault": device.fault,
        "unmet": list(each.unmet),
        "promises": [
            {**_who(promise.who), "memory_bytes": promise.share.memory_bytes, "granted": promise.granted}
            for promise in each.promises
        ],
        "leases": [_held(held) for held in each.leases],
    }


def _leases(leases: tuple[Held, ...] | None) -> list[Row] | None:
    return None if leases is None else [_held(held) for held in leases]


def _held(held: Held) -> Row:
    return {
        "id": held.lease.lease_id,
        **_who(held.who),
        "age": held.age_seconds,
        "shares": [_share(share) for share in held.lease.shares],
    }


def _who(who: Who) -> Row:
    return asdict(who)


def _share(share: Share) -> Row:
    return {"device_id": share.host_index, "memory_bytes": share.memory_bytes, "exclusive": share.exclusive}
