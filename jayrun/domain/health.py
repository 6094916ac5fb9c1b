"""What `jayrun doctor` makes of what it was shown: whether each thing is well, what is wrong, and what to type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from jayrun.domain.liveness import Verdict
from jayrun.domain.units import format_bytes, format_seconds

OLDEST_SERVER = 14
"""The oldest major version of PostgreSQL that can keep a book."""
MOST_CLOCK_SECONDS = 5.0
"""A clock kept by a time service is right to milliseconds; from here on surely none keeps one of the two."""
LONG_TRIP_SECONDS = 0.05
"""Every admission of a host waits for one round trip of whoever is in the gate, so this allows 20 a second."""
LEAST_CONNECTIONS = 10
"""A process that waits uses two, and one for each thread that reserves."""


class State(StrEnum):
    """How a check ended. A warning is for what works now but not as it should; skipped is what could not be asked."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing that a check has to say; `next`: what to type or to do about it."""

    state: State
    detail: str
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, all its remarks in one: the worst one's state comes first."""

    check: str
    state: State
    detail: str
    next: str | None

    @classmethod
    def of(cls, check: str, remarks: Iterable[Remark]) -> Finding:
        """The remarks of a check put together; there must be one."""
        order = list(State)
        ordered = sorted(remarks, key=lambda remark: -order.index(remark.state))
        todo = dict.fromkeys(remark.next for remark in ordered if remark.next)
        return cls(check, ordered[0].state, "; ".join(each.detail for each in ordered), "; ".join(todo) or None)


def ok(detail: str, next: str | None = None) -> Remark:
    return Remark(State.OK, detail, next)


def skipped(detail: str, next: str | None = None) -> Remark:
    return Remark(State.SKIPPED, detail, next)


def warning(detail: str, next: str | None = None) -> Remark:
    return Remark(State.WARNING, detail, next)


def failed(detail: str, next: str | None = None) -> Remark:
    return Remark(State.FAILED, detail, next)


# --- the environment -------------------------------------------------------------------------------------------------


def judge_variables(given: Mapping[str, str], known: Sequence[str]) -> list[Remark]:
    """Of the variables `given` that look like jayrun's, those that it does not read, and those that cancel another."""
    found = []
    for name in sorted(set(given) - set(known)):
        close = get_close_matches(name, known, 1, 0.75)
        meant = f", but perhaps {close[0]} is meant" if close else f"; there are {', '.join(known)}"
        found.append(warning(f"{name} is set, which jayrun does not know{meant}", f"unset {name}"))
    if given.get("JAYRUN_DATABASE_URL") and given.get("JAYRUN_HOME"):
        found.append(
            warning("JAYRUN_HOME has no effect, for JAYRUN_DATABASE_URL is set too", "unset the one that is not meant")
        )
    if given.get("JAYRUN_PROBES"):
        found.append(warning("JAYRUN_PROBES is set: programs stop at the fault points of tests", "unset JAYRUN_PROBES"))
    return found


# --- the database ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a server says of itself. `version`: such as 180006. `settings`: by name, as it writes them."""

    version: int
    version_text: str
    is_standby: bool
    is_read_only: bool
    settings: Mapping[str, str]


def judge_server(server: Server) -> list[Remark]:
    """Whether the server can keep a book, and keeps what it has promised when it crashes."""
    found = [ok(f"PostgreSQL {server.version_text}")]
    if server.version < OLDEST_SERVER * 10_000:
        found.append(failed(f"jayrun needs PostgreSQL {OLDEST_SERVER} or newer", "move the book to a newer server"))
    if server.is_standby:
        found.append(
            failed("it is a standby and takes no writes", "let JAYRUN_DATABASE_URL name the primary, or both of them")
        )
    elif server.is_read_only:
        found.append(
            failed(
                "it takes no writes: default_transaction_read_only is on",
                "ALTER ROLE ... SET default_transaction_read_only = off",
            )
        )
    for name, why in (
        ("fsync", "a crash of its machine may destroy the book"),
        ("full_page_writes", "a crash of its machine may destroy the book"),
        ("synchronous_commit", "a crash of it may forget leases that were granted, and grant them again"),
    ):
        if server.settings.get(name) == "off":
            found.append(warning(f"{name} is off: {why}", f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()"))
    return found


@dataclass(frozen=True, slots=True)
class Access:
    """What the role may do. `lacks`: rights that a program needs, such as "INSERT on jayrun.leases"; `may_look`: it can
    read the book."""

    role: str
    may_look: bool
    lacks: Sequence[str]


def judge_access(access: Access) -> list[Remark]:
    """Whether the role may lease, or only look."""
    who, ask = f"role {access.role}", "ask the owner of the book: GRANT jayrun_worker TO"
    remedy = f"{ask} {access.role} (a role that `jayrun db upgrade` gives its rights to, once it exists)"
    if not access.may_look:
        return [failed(f"{who} may not even look into the book", remedy)]
    if not access.lacks:
        return [ok(f"{who} may lease")]
    some = ", ".join(access.lacks[:3]) + (f" and {len(access.lacks) - 3} more" if len(access.lacks) > 3 else "")
    return [warning(f"{who} may look, but not lease: it lacks {some}", remedy)]


def judge_clock(ahead_seconds: float, trip_seconds: float) -> list[Remark]:
    """This host's clock against the database's, known to half a round trip. Leases do not depend on it: all times in
    the book are the database's own; but what is shown here is compared with them."""
    trip = f"a round trip takes {trip_seconds * 1000:.2f} ms"
    found = [ok(trip)]
    if trip_seconds > LONG_TRIP_SECONDS:
        most = f"so at most {1 / trip_seconds:.0f} leases a second are granted on a host"
        found = [warning(f"{trip}, {most}", "move the database nearer, or have one for each site")]
    if abs(ahead_seconds) > MOST_CLOCK_SECONDS + trip_seconds / 2:
        side = "ahead of" if ahead_seconds > 0 else "behind"
        found.append(
            warning(
                f"this host's clock is {format_seconds(abs(ahead_seconds))} {side} the database's: leases are not "
                "touched by that, but the times in logs and listings do not match",
                "timedatectl set-ntp true (on whichever is wrong)",
            )
        )
    else:
        found.append(ok(f"the clocks differ by {abs(ahead_seconds):.2f} s"))
    return found


def judge_connections(used: int, most: int) -> list[Remark]:
    """Whether there is room for more of them: `most` is what the server allows this role."""
    told = f"{used} of {most} connections are used"
    if most - used < LEAST_CONNECTIONS:
        return [
            warning(
                f"{told}, and a process needs one, or two while it waits",
                "raise max_connections, or put pgbouncer between (docs/programs.md)",
            )
        ]
    return [ok(told)]


def judge_listener(*, heard_seconds: float | None, is_pooled: bool, poll_seconds: float) -> list[Remark]:
    """Whether a notification arrived that was sent; None: it did not."""
    if heard_seconds is not None:
        return [ok(f"a notification arrives, after {heard_seconds * 1000:.1f} ms")]
    slower = f"whoever waits looks every {poll_seconds:g} s instead of being woken"
    if is_pooled:
        return [
            warning(
                f"no notification passes the pooler: {slower}",
                "connect to the server itself, or set pool_mode = session, where waits should end sooner",
            )
        ]
    return [failed(f"a notification that was sent did not arrive: {slower}", "see what stands before the server")]


# --- hosts and devices -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHost:
    """This host as the book has it. `silent_seconds`: since somebody of it was heard of, while the book was in reach;
    `is_this_boot`: that spoke through the boot that runs now; `speaks_elsewhere`: another boot spoke while it was
    looked at. `twins`: other entries of this very machine that have devices too."""

    name: str
    identity: str
    is_this_boot: bool
    silent_seconds: float
    ttl_seconds: float
    speaks_elsewhere: bool = False
    live_leases: int = 0
    twins: Sequence[str] = ()


def judge_host(host: KnownHost | None, *, fleeting: bool) -> list[Remark]:
    """Whether the book knows this host, and as one machine. `fleeting`: its identity does not outlast a restart."""
    if host is None:
        found = [ok("the book does not know this host yet; its first program, or `jayrun devices declare`, adds it")]
    else:
        found = [ok(f"{host.name} ({host.identity})")]
    if fleeting:
        found.append(
            warning(
                "there is no /etc/machine-id, so after a restart this is another host",
                "systemd-machine-id-setup, or set JAYRUN_HOST_ID to something unique",
            )
        )
    if host is None:
        return found
    heard = format_seconds(host.silent_seconds)
    if host.speaks_elsewhere:
        found.append(
            failed(
                f"another machine speaks as {host.identity!r} too, and neither gets what it asks for",
                "set JAYRUN_HOST_ID to something unique on one of them, and start its programs again",
            )
        )
    elif not host.is_this_boot and host.silent_seconds < host.ttl_seconds:
        found.append(
            warning(
                f"it was heard of {heard} ago from before its last restart: programs wait until that was "
                f"{format_seconds(host.ttl_seconds)} ago",
                "wait; if it lasts, another machine has the same identity: set JAYRUN_HOST_ID on one of them",
            )
        )
    elif not host.is_this_boot:
        found.append(ok("it has restarted since it was last heard of"))
    elif host.silent_seconds >= host.ttl_seconds and host.live_leases:
        found.append(
            warning(
                f"nobody of it was in touch for {heard}, though it has {host.live_leases} live lease(s)",
                "jayrun reconciler (better as a service: it sees who has died)",
            )
        )
    if host.twins:
        found.append(
            failed(
                f"this machine is in the book as {', '.join(host.twins)} too, and its devices may be leased twice",
                "set the same JAYRUN_HOST_ID, or none, for all its users; then `jayrun hosts forget` the other",
            )
        )
    return found


def judge_holders(verdicts: Sequence[tuple[Verdict, bool]]) -> list[Remark]:
    """The processes of this host that the book has as alive: what the kernel says, and whether they were silent."""
    dead = sum(verdict is Verdict.DEAD for verdict, _ in verdicts)
    unseen = sum(verdict is Verdict.UNSEEN and silent for verdict, silent in verdicts)
    stopped = sum(verdict is Verdict.ALIVE and silent for verdict, silent in verdicts)
    found = [ok(f"{len(verdicts)} alive in the book")]
    if dead:
        found.append(
            warning(
                f"{dead} of them are dead, and nobody has ended them yet",
                "jayrun leases list (ends them now; `jayrun reconciler` always does)",
            )
        )
    if unseen:
        found.append(warning(f"{unseen} are silent and cannot be seen from here", "jayrun holders list"))
    if stopped:
        found.append(warning(f"{stopped} are silent though their processes live: stopped?", "jayrun holders list"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """A device of this host as the book has it."""

    kind: str
    host_index: int
    backends: Sequence[str]
    uuid: str | None
    parent_uuid: str | None
    capacity_bytes: int
    state: str
    fault: str | None
    declared: bool
    withheld_bytes: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.host_index}"


def judge_devices(devices: Sequence[KnownDevice]) -> list[Remark]:
    """Whether there is something to lease, and what is kept from being leased."""
    if not devices:
        return [
            warning(
                "the book has no devices of this host, so every request is impossible",
                "jayrun devices discover, or jayrun devices declare",
            )
        ]
    declared = sum(device.declared for device in devices)
    kinds = [f"{declared} declared"] * bool(declared)
    kinds += [f"{len(devices) - declared} discovered"] * (declared < len(devices))
    found = [ok(f"{len(devices)} ({', '.join(kinds)})")]
    for device in devices:
        if device.fault is not None:
            found.append(warning(f"{device.name} is at fault: {device.fault}", "jayrun devices list"))
        elif device.state != "online":
            kind = "" if device.kind == "gpu" else f" --device {device.kind}"
            found.append(
                warning(f"{device.name} is {device.state}", f"jayrun devices resume {device.host_index}{kind}")
            )
        if device.withheld_bytes:
            found.append(
                warning(f"{format_bytes(device.withheld_bytes)} of {device.name} are withheld", "jayrun devices list")
            )
    return found


def judge_driver(problem: str | None, *, has_files: bool, known: Sequence[KnownDevice]) -> list[Remark]:
    """What it means that the NVIDIA driver shows nothing: trouble, where there should be something."""
    assert problem is not None
    detail, _, remedy = problem.partition(": ")
    found = [device for device in known if device.uuid is not None and "cuda" in device.backends]
    if found:
        return [failed(f"{detail}; the book has {len(found)} device(s) of this host that it showed", remedy or None)]
    return [failed(detail, remedy or None)] if has_files else [skipped(detail)]


def judge_hardware(known: Sequence[KnownDevice], shown: Sequence[str], *, sees_host: bool) -> list[Remark]:
    """The devices of the book against those that the driver shows, by UUID. `sees_host`: not from a container, which
    may have been given only some."""
    cuda = {device.uuid: device for device in known if device.uuid is not None and "cuda" in device.backends}
    new = [uuid for uuid in shown if uuid not in cuda]
    gone = [device for uuid, device in cuda.items() if uuid not in shown]
    both = len(shown) - len(new)
    if new and not cuda and any("cuda" in device.backends for device in known):
        return [
            warning(
                f"the driver shows {len(new)} device(s), and the book knows its own by number only: it cannot be told "
                "which is which",
                "jayrun devices discover",
            )
        ]
    found = [ok(f"{both} device(s) are in the book and shown by the driver")]
    if new:
        found.append(warning(f"not in the book: {', '.join(new)}", "jayrun devices discover"))
    if gone and sees_host:
        names = ", ".join(f"{device.name} ({device.uuid})" for device in gone)
        found.append(
            warning(
                f"in the book, but not shown by the driver: {names}",
                "jayrun devices discover (marks them), or jayrun devices remove",
            )
        )
    elif gone:
        found.append(ok(f"{len(gone)} more are in the book, and not shown to this container"))
    return found
