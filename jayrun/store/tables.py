"""The tables of the book as SQLAlchemy Core sees them; a test holds them equal to the migrated schema."""

from __future__ import annotations

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Column,
    Computed,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    MetaData,
    Sequence,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP, UUID

metadata = MetaData(schema="jayrun")
INSTANT = TIMESTAMP(timezone=True)
NOW = func.clock_timestamp()

gate = Table("gate", metadata)

settings = Table(
    "settings",
    metadata,
    Column("only_row", Boolean, primary_key=True, server_default=text("true")),
    Column("bypass_limit", Integer, nullable=False, server_default="16"),
    Column("grants_per_batch", Integer, nullable=False, server_default="64"),
    Column("tick_seconds", Double, nullable=False, server_default="2"),
    Column("holder_ttl_seconds", Double, nullable=False, server_default="30"),
    Column("claim_seconds", Double, nullable=False, server_default="10"),
    Column("crash_limit", Integer, nullable=False, server_default="3"),
    Column("cancel_seconds", Double, nullable=False, server_default="10"),
    Column("lend_seconds", Double, nullable=False, server_default="60"),
    Column("look_seconds", Double, nullable=False, server_default="30"),
    Column("idle_lease_seconds", Double, nullable=False, server_default="600"),
    Column("respect_observed", Boolean, nullable=False, server_default=text("false")),
    Column("quarantine_seconds", Double, nullable=False, server_default="0"),
)

hosts = Table(
    "hosts",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("identity", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("registered_at", INSTANT, nullable=False, server_default=NOW),
    Column("seen_at", INSTANT, nullable=False, server_default=NOW),
    Column("watched_since", INSTANT, nullable=False, server_default=NOW),
    Column("forgotten_at", INSTANT),
    Column("looked_at", INSTANT),
)

devices = Table(
    "devices",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("host_id", BigInteger, ForeignKey("jayrun.hosts.id"), nullable=False),
    Column("host_index", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("backends", ARRAY(Text), nullable=False),
    Column("device_uuid", Text),
    Column("name", Text, nullable=False, server_default=""),
    Column("capacity_bytes", BigInteger, nullable=False),
    Column("declared", Boolean, nullable=False, server_default=text("true")),
    Column("total_bytes", BigInteger),
    Column("reserve_bytes", BigInteger, nullable=False, server_default="0"),
    Column("withheld_bytes", BigInteger, nullable=False, server_default="0"),
    Column("pci_bus_id", Text),
    Column("ignore_bytes", BigInteger, nullable=False, server_default="512000000"),
    Column(
        "ignore_commands",
        ARRAY(Text),
        nullable=False,
        server_default=text(
            "ARRAY['Xorg', 'Xwayland', 'gnome-shell', 'kwin_wayland', 'kwin_x11', 'plasmashell', "
            "'nvidia-cuda-mps-server']"
        ),
    ),
    Column("parent_uuid", Text),
    Column("island", Integer),
    Column("fault", Text),
    Column("exclusive_only", Boolean, nullable=False, server_default=text("false")),
    Column("state", Text, nullable=False, server_default="online"),
    Column("reserved_bytes", BigInteger, nullable=False, server_default="0"),
    Column("share_count", Integer, nullable=False, server_default="0"),
    Column("exclusive_count", Integer, nullable=False, server_default="0"),
    Column("declared_at", INSTANT, nullable=False, server_default=NOW),
    Column("removed_at", INSTANT),
    UniqueConstraint("host_id", "kind", "host_index"),
    UniqueConstraint("host_id", "device_uuid"),
)

device_links = Table(
    "device_links",
    metadata,
    Column("device_id", BigInteger, ForeignKey("jayrun.devices.id"), primary_key=True),
    Column("other_id", BigInteger, ForeignKey("jayrun.devices.id"), primary_key=True),
    Column("link", Text, nullable=False),
)

holders = Table(
    "holders",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("host_id", BigInteger, ForeignKey("jayrun.hosts.id"), nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("pid_namespace", BigInteger, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("start_ticks", BigInteger, nullable=False),
    Column("user_name", Text, nullable=False),
    Column("database_user", Text, nullable=False, server_default=text("SESSION_USER")),
    Column("label", Text, nullable=False, server_default=""),
    Column("command", Text, nullable=False, server_default=""),
    Column("role", Text, nullable=False),
    Column("operators", ARRAY(Text)),
    Column("silent", Boolean, nullable=False, server_default=text("false")),
    Column("only_waits", Boolean, nullable=False, server_default=text("false")),
    Column("visible", JSONB),
    Column("state", Text, nullable=False, server_default="alive"),
    Column("registered_at", INSTANT, nullable=False, server_default=NOW),
    Column("seen_at", INSTANT, nullable=False, server_default=NOW),
    Column("ended_at", INSTANT),
    Column("end_reason", Text),
)
Index("holders_alive", holders.c.host_id, postgresql_where=holders.c.state == "alive")

ages = Sequence("ages", metadata=metadata)
executions = Table(
    "executions",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("detached", Boolean, nullable=False, server_default=text("false")),
    Column("name", Text, nullable=False),
    Column("unit_id", UUID, nullable=False),
    Column("host_id", BigInteger, ForeignKey("jayrun.hosts.id")),
    Column("pinned_host_id", BigInteger, ForeignKey("jayrun.hosts.id")),
    Column("queue_id", BigInteger, Computed("coalesce(host_id, 0)", persisted=True), nullable=False),
    Column("holder_id", UUID, ForeignKey("jayrun.holders.id")),
    Column("user_name", Text, nullable=False, server_default=""),
    Column("label", Text, nullable=False, server_default=""),
    Column("state", Text, nullable=False),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("age", BigInteger, nullable=False, server_default=ages.next_value()),
    Column("key", Text),
    Column("inputs", JSONB),
    Column("result", JSONB),
    Column("result_kind", Text),
    Column("failure", JSONB),
    Column("attempt", Integer, nullable=False, server_default="1"),
    Column("max_attempts", Integer, nullable=False, server_default="1"),
    Column("retry_on", ARRAY(Text), nullable=False, server_default=text("'{}'::text[]")),
    Column("retry_seconds", Double, nullable=False, server_default="0"),
    Column("retry_backoff", Double, nullable=False, server_default="1"),
    Column("not_before", INSTANT),
    Column("crashes", Integer, nullable=False, server_default="0"),
    Column("invocation", Integer, nullable=False, server_default="1"),
    Column("claim", BigInteger, nullable=False, server_default="0"),
    Column("shape", Text),
    Column("bypassed", Integer, nullable=False, server_default="0"),
    Column("dormant", Boolean, nullable=False, server_default=text("false")),
    Column("watched", Boolean, nullable=False, server_default=text("false")),
    Column("cancelled_at", INSTANT),
    Column("submitted_at", INSTANT, nullable=False, server_default=NOW),
    Column("waiting_since", INSTANT),
    Column("admitted_at", INSTANT),
    Column("claimed_at", INSTANT),
    Column("ended_at", INSTANT),
    Column("waited_seconds", Double, nullable=False, server_default="0"),
    Column("idle_since", INSTANT),
    Column("flagged_at", INSTANT),
)
Index("executions_key", executions.c.key, unique=True, postgresql_where=executions.c.key.is_not(None))
Index(
    "executions_waiting",
    executions.c.queue_id,
    executions.c.shape,
    executions.c.priority.desc(),
    executions.c.age,
    postgresql_where=text("state = 'waiting' AND id = unit_id"),
)
Index(
    "executions_waiting_for_workers",
    executions.c.name,
    executions.c.priority.desc(),
    executions.c.age,
    postgresql_where=text("state = 'waiting' AND detached AND id = unit_id"),
)
Index(
    "executions_ready",
    executions.c.name,
    executions.c.priority.desc(),
    executions.c.age,
    postgresql_where=text("state = 'ready'"),
)
Index(
    "executions_one_per_worker",
    executions.c.holder_id,
    unique=True,
    postgresql_where=text("detached AND id = unit_id AND state IN ('admitted', 'running')"),
)
Index("executions_unit", executions.c.unit_id)
Index("executions_held", executions.c.holder_id, postgresql_where=text("state IN ('running', 'waiting', 'admitted')"))

placement_requests = Table(
    "placement_requests",
    metadata,
    Column("execution_id", UUID, ForeignKey("jayrun.executions.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("device", Text, nullable=False),
    Column("backend", Text, nullable=False),
    Column("is_group", Boolean, nullable=False),
    Column("min_devices", Integer, nullable=False),
    Column("max_devices", Integer, nullable=False),
    Column("prefer_max_devices", Boolean, nullable=False),
    Column("group_bytes", BigInteger, nullable=False),
    Column("per_device_bytes", BigInteger, nullable=False),
    Column("exclusive", Boolean, nullable=False),
    Column("device_id", Integer),
)

epochs = Sequence("epochs", metadata=metadata)
leases = Table(
    "leases",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("execution_id", UUID, nullable=False),
    Column("position", Integer, nullable=False),
    Column("invocation", Integer, nullable=False),
    Column("host_id", BigInteger, ForeignKey("jayrun.hosts.id"), nullable=False),
    Column("epoch", BigInteger, nullable=False, server_default=epochs.next_value()),
    Column("holder_count", Integer, nullable=False, server_default="0"),
    Column("granted_at", INSTANT, nullable=False, server_default=NOW),
    Column("ended_at", INSTANT),
    Column("end_reason", Text),
    ForeignKeyConstraint(
        ["execution_id", "position"], ["jayrun.placement_requests.execution_id", "jayrun.placement_requests.position"]
    ),
    UniqueConstraint("execution_id", "position", "invocation", name="leases_one_per_request"),
)

lease_shares = Table(
    "lease_shares",
    metadata,
    Column("lease_id", UUID, ForeignKey("jayrun.leases.id"), primary_key=True),
    Column("device_id", BigInteger, ForeignKey("jayrun.devices.id"), primary_key=True),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("exclusive", Boolean, nullable=False),
    Column("ended_at", INSTANT),
    Column("folded_at", INSTANT),
)
Index("lease_shares_unfolded", lease_shares.c.device_id, postgresql_where=lease_shares.c.folded_at.is_(None))
Index(
    "lease_shares_to_fold",
    lease_shares.c.device_id,
    postgresql_where=text("ended_at IS NOT NULL AND folded_at IS NULL"),
)

lease_holders = Table(
    "lease_holders",
    metadata,
    Column("lease_id", UUID, ForeignKey("jayrun.leases.id"), primary_key=True),
    Column("holder_id", UUID, ForeignKey("jayrun.holders.id"), primary_key=True),
    Column("hold", Integer, primary_key=True, server_default="0"),
    Column("since", INSTANT, nullable=False, server_default=NOW),
    Column("ended_at", INSTANT),
    Column("end_reason", Text),
)
Index("lease_holders_live", lease_holders.c.holder_id, postgresql_where=lease_holders.c.ended_at.is_(None))

lease_events = Table(
    "lease_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", INSTANT, nullable=False, server_default=NOW),
    Column("kind", Text, nullable=False),
    Column("execution_id", UUID),
    Column("lease_id", UUID),
    Column("holder_id", UUID),
    Column("epoch", BigInteger),
    Column("detail", Text),
)
Index("lease_events_lease", lease_events.c.lease_id, postgresql_where=lease_events.c.lease_id.is_not(None))
Index("lease_events_declared", lease_events.c.holder_id, postgresql_where=lease_events.c.kind == "declared")

quarantines = Table(
    "quarantines",
    metadata,
    Column("lease_id", UUID, ForeignKey("jayrun.leases.id"), primary_key=True),
    Column("device_id", BigInteger, ForeignKey("jayrun.devices.id"), primary_key=True),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("since", INSTANT, nullable=False),
    Column("until", INSTANT, nullable=False),
    Column("ended_at", INSTANT),
)
Index("quarantines_open", quarantines.c.device_id, postgresql_where=quarantines.c.ended_at.is_(None))

device_observations = Table(
    "device_observations",
    metadata,
    Column("device_id", BigInteger, ForeignKey("jayrun.devices.id"), primary_key=True, autoincrement=False),
    Column("observed_at", INSTANT, nullable=False),
    Column("finding", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("shows_processes", Boolean, nullable=False),
    Column("used_bytes", BigInteger),
    Column("usable_bytes", BigInteger),
    Column("foreign_bytes", BigInteger),
)

lease_observations = Table(
    "lease_observations",
    metadata,
    Column("device_id", BigInteger, ForeignKey("jayrun.devices.id"), primary_key=True),
    Column("lease_id", UUID, primary_key=True),
    Column("finding", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("used_bytes", BigInteger),
    Column("leased_bytes", BigInteger, nullable=False),
    Column("unused_since", INSTANT),
)

process_observations = Table(
    "process_observations",
    metadata,
    Column("device_id", BigInteger, ForeignKey("jayrun.devices.id"), primary_key=True),
    Column("pid", Integer, primary_key=True),
    Column("start_ticks", BigInteger),
    Column("finding", Text),
    Column("detail", Text, nullable=False),
    Column("lease_id", UUID),
    Column("user_name", Text, nullable=False),
    Column("command", Text, nullable=False),
    Column("used_bytes", BigInteger),
    Column("first_seen", INSTANT, nullable=False),
)
