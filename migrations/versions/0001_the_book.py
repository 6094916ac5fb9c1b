"""The book: tables, what the database itself refuses, and the auditor's first views.

Written as plain SQL so that it reads as what it is. PostgreSQL 14 or newer, no contrib. Everything that must hold
whoever writes (a program of ours, a later version of it, a hand in psql) is a constraint or a trigger here:

- device counters move only with shares, and an increase above the capacity is refused;
- an exclusive share is alone on its device;
- a lease ends once, its shares end with it, and a share leaves the counters only after it ended;
- states move only along the legal moves; events are never changed or deleted.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = """
CREATE SCHEMA IF NOT EXISTS jayrun;
CREATE SCHEMA jayrun_audit;

CREATE TABLE jayrun.gate ();
COMMENT ON TABLE jayrun.gate IS 'Empty; locked as the first statement of every admission, so admissions queue instead of aborting';

CREATE TABLE jayrun.settings (
    only_row            boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    bypass_limit        integer NOT NULL DEFAULT 16 CHECK (bypass_limit >= 0),
    grants_per_batch    integer NOT NULL DEFAULT 64 CHECK (grants_per_batch >= 1),
    tick_seconds        double precision NOT NULL DEFAULT 2 CHECK (tick_seconds > 0),
    holder_ttl_seconds  double precision NOT NULL DEFAULT 30 CHECK (holder_ttl_seconds > 0),
    claim_seconds       double precision NOT NULL DEFAULT 10 CHECK (claim_seconds > 0),
    crash_limit         integer NOT NULL DEFAULT 3 CHECK (crash_limit >= 1),
    cancel_seconds      double precision NOT NULL DEFAULT 10 CHECK (cancel_seconds >= 0),
    lend_seconds        double precision NOT NULL DEFAULT 60 CHECK (lend_seconds >= 0),
    look_seconds        double precision NOT NULL DEFAULT 30 CHECK (look_seconds > 0),
    idle_lease_seconds  double precision NOT NULL DEFAULT 600 CHECK (idle_lease_seconds >= 0),
    respect_observed    boolean NOT NULL DEFAULT false,
    quarantine_seconds  double precision NOT NULL DEFAULT 0 CHECK (quarantine_seconds >= 0),
    -- Else who ticks would be silent in between, and nobody would ever be judged by time.
    CONSTRAINT settings_ttl_of_three_ticks CHECK (holder_ttl_seconds >= 3 * tick_seconds)
);
INSERT INTO jayrun.settings DEFAULT VALUES;
COMMENT ON TABLE jayrun.settings IS 'One row: the settings of the whole book';
COMMENT ON COLUMN jayrun.settings.bypass_limit IS
    'So many grants may go to others before somebody who waited longer, and could use the device; then it is kept for it';
COMMENT ON COLUMN jayrun.settings.grants_per_batch IS 'So many who wait one admission serves at most, before it lets others go on';
COMMENT ON COLUMN jayrun.settings.tick_seconds IS
    'How often every process looks for what the dead left, and shows life; at most a third of holder_ttl_seconds';
COMMENT ON COLUMN jayrun.settings.holder_ttl_seconds IS
    'After so much silence a host gets no new leases, and a process that nobody of its host can see is held to be gone';
COMMENT ON COLUMN jayrun.settings.claim_seconds IS 'A grant that its execution has not claimed for so long goes back';
COMMENT ON COLUMN jayrun.settings.crash_limit IS 'So many workers an execution may bring down before it has failed';
COMMENT ON COLUMN jayrun.settings.cancel_seconds IS
    'A worker whose execution goes on for so long after it was asked to end is killed; 0: at once';
COMMENT ON COLUMN jayrun.settings.lend_seconds IS 'For so long a process keeps the lease of a placement that it has pickled';
COMMENT ON CONSTRAINT settings_ttl_of_three_ticks ON jayrun.settings IS
    'holder_ttl_seconds is at least three times tick_seconds';
COMMENT ON COLUMN jayrun.settings.look_seconds IS 'How often reconcilers look at the hardware itself';
COMMENT ON COLUMN jayrun.settings.idle_lease_seconds IS
    'A lease whose holders have used no memory of its devices for so long is told by the audit as idle';
COMMENT ON COLUMN jayrun.settings.respect_observed IS
    'Memory that processes without a lease were seen to use is not granted';
COMMENT ON COLUMN jayrun.settings.quarantine_seconds IS
    'After an unclean end the share is granted again when the driver shows its memory free, or after so long; 0: at once';

CREATE TABLE jayrun.hosts (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    identity      text NOT NULL UNIQUE CHECK (identity <> ''),
    name          text NOT NULL,
    boot_id       text NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    watched_since timestamptz NOT NULL DEFAULT clock_timestamp(),
    forgotten_at  timestamptz,
    looked_at     timestamptz
) WITH (fillfactor = 50);
COMMENT ON COLUMN jayrun.hosts.watched_since IS
    'Since when somebody of the host has been heard of without a gap; nobody is judged by time who had no more time than that';
COMMENT ON COLUMN jayrun.hosts.forgotten_at IS 'Since when an administrator has declared it gone; over once it is seen again';
COMMENT ON COLUMN jayrun.hosts.looked_at IS 'When a process of the host last began to look at its hardware by itself';

CREATE TABLE jayrun.devices (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    host_id         bigint NOT NULL REFERENCES jayrun.hosts,
    host_index      integer NOT NULL CHECK (host_index >= 0),
    kind            text NOT NULL CHECK (kind IN ('gpu', 'tpu')),
    backends        text[] NOT NULL CHECK (
        cardinality(backends) > 0 AND backends <@ ARRAY['cuda', 'mps', 'opencl', 'rocm', 'xla', 'xpu']),
    device_uuid     text,
    name            text NOT NULL DEFAULT '',
    capacity_bytes  bigint NOT NULL CHECK (capacity_bytes > 0),
    declared        boolean NOT NULL DEFAULT true,
    total_bytes     bigint CHECK (total_bytes > 0),
    reserve_bytes   bigint NOT NULL DEFAULT 0 CHECK (reserve_bytes >= 0),
    withheld_bytes  bigint NOT NULL DEFAULT 0 CHECK (withheld_bytes >= 0),
    pci_bus_id      text,
    ignore_bytes    bigint NOT NULL DEFAULT 512000000 CHECK (ignore_bytes >= 0),
    ignore_commands text[] NOT NULL DEFAULT ARRAY[
        'Xorg', 'Xwayland', 'gnome-shell', 'kwin_wayland', 'kwin_x11', 'plasmashell', 'nvidia-cuda-mps-server'],
    parent_uuid     text,
    island          integer,
    fault           text CHECK (fault <> ''),
    exclusive_only  boolean NOT NULL DEFAULT false,
    state           text NOT NULL DEFAULT 'online' CHECK (state IN ('online', 'draining', 'offline')),
    reserved_bytes  bigint NOT NULL DEFAULT 0 CHECK (reserved_bytes >= 0),
    share_count     integer NOT NULL DEFAULT 0 CHECK (share_count >= 0),
    exclusive_count integer NOT NULL DEFAULT 0,
    declared_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    removed_at      timestamptz,
    UNIQUE (host_id, kind, host_index),
    UNIQUE (host_id, device_uuid),
    CONSTRAINT devices_exclusive_alone CHECK (exclusive_count = 0 OR (exclusive_count = 1 AND share_count = 1)),
    CONSTRAINT devices_removed_empty CHECK (removed_at IS NULL OR share_count = 0)
) WITH (fillfactor = 25);
COMMENT ON COLUMN jayrun.devices.declared IS
    'capacity_bytes is what a person said, which discovery never changes; else it follows what the driver reports';
COMMENT ON COLUMN jayrun.devices.total_bytes IS 'What the driver reports in all; null: it does not say';
COMMENT ON COLUMN jayrun.devices.reserve_bytes IS 'So much of what the driver reports is left to others by discovery';
COMMENT ON COLUMN jayrun.devices.withheld_bytes IS
    'Not leased and yet not granted: used by processes without a lease (if respected), or in quarantine; whichever is more';
COMMENT ON COLUMN jayrun.devices.ignore_bytes IS
    'The audit passes over so much that a process uses beside its lease (a CUDA context takes some 300 to 500 MB), and that all processes without a lease use together';
COMMENT ON COLUMN jayrun.devices.ignore_commands IS
    'The audit passes over processes of these names, such as a desktop''s, whatever they use';
COMMENT ON COLUMN jayrun.devices.parent_uuid IS 'The GPU that this MIG slice is a part of; null: it is a whole device';
COMMENT ON COLUMN jayrun.devices.island IS 'Devices of a host with the same number are linked to each other most closely';
COMMENT ON COLUMN jayrun.devices.fault IS
    'Why the hardware does not serve it now: it counts as offline until discovery sees it again; null: nothing is known against it';

CREATE TABLE jayrun.device_links (
    device_id bigint NOT NULL REFERENCES jayrun.devices,
    other_id  bigint NOT NULL REFERENCES jayrun.devices,
    link      text NOT NULL CHECK (link IN ('nvlink', 'board', 'switch', 'switches', 'bridge', 'node', 'system')),
    PRIMARY KEY (device_id, other_id),
    CHECK (device_id < other_id)
);
COMMENT ON TABLE jayrun.device_links IS
    'How two devices of a host reach each other, closest first: NVLink, one board, one PCIe switch, several, a host bridge, a NUMA node, the whole system';

CREATE TABLE jayrun.holders (
    id             uuid PRIMARY KEY,
    host_id        bigint NOT NULL REFERENCES jayrun.hosts,
    boot_id        text NOT NULL,
    pid_namespace  bigint NOT NULL,
    pid            integer NOT NULL CHECK (pid > 0),
    start_ticks    bigint NOT NULL CHECK (start_ticks >= 0),
    user_name      text NOT NULL,
    database_user  text NOT NULL DEFAULT session_user,
    label          text NOT NULL DEFAULT '',
    command        text NOT NULL DEFAULT '',
    role           text NOT NULL CHECK (role IN ('runtime', 'command', 'wrapper', 'worker', 'supervisor')),
    operators      text[] CHECK ((operators IS NOT NULL) <= (role = 'worker')),
    silent         boolean NOT NULL DEFAULT false,
    only_waits     boolean NOT NULL DEFAULT false,
    visible        jsonb CHECK (jsonb_typeof(visible) = 'object'),
    state          text NOT NULL DEFAULT 'alive' CHECK (state IN ('alive', 'ended')),
    registered_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at       timestamptz,
    end_reason     text CHECK (end_reason IN ('left', 'dead', 'declared')),
    CHECK ((state = 'ended') = (ended_at IS NOT NULL) AND (ended_at IS NULL) = (end_reason IS NULL))
) WITH (fillfactor = 60);
CREATE INDEX holders_alive ON jayrun.holders (host_id) WHERE state = 'alive';
COMMENT ON COLUMN jayrun.holders.operators IS 'The operators that a worker takes now; none while it starts or drains';
COMMENT ON COLUMN jayrun.holders.visible IS
    'By backend, the devices that its mask lets it see, in its own order: a UUID, or the number on the host; null, or a backend that is missing: all';
COMMENT ON COLUMN jayrun.holders.silent IS
    'A worker that did not claim a grant in time: it gets none until it shows life';
COMMENT ON COLUMN jayrun.holders.only_waits IS
    'Nothing happens in it, and it drops nothing, before one of its executions is served';

CREATE SEQUENCE jayrun.ages;
CREATE TABLE jayrun.executions (
    id             uuid PRIMARY KEY,
    kind           text NOT NULL CHECK (kind IN ('operator', 'resource', 'command')),
    detached       boolean NOT NULL DEFAULT false,
    name           text NOT NULL,
    unit_id        uuid NOT NULL,
    host_id        bigint REFERENCES jayrun.hosts,
    pinned_host_id bigint REFERENCES jayrun.hosts,
    queue_id       bigint NOT NULL GENERATED ALWAYS AS (coalesce(host_id, 0)) STORED,
    holder_id      uuid REFERENCES jayrun.holders,
    user_name      text NOT NULL DEFAULT '',
    label          text NOT NULL DEFAULT '',
    state          text NOT NULL CHECK (state IN (
        'ready', 'running', 'waiting', 'admitted', 'succeeded', 'failed', 'cancelled')),
    priority       integer NOT NULL DEFAULT 0,
    age            bigint NOT NULL DEFAULT nextval('jayrun.ages'),
    key            text,
    inputs         jsonb,
    result         jsonb,
    result_kind    text,
    failure        jsonb,
    attempt        integer NOT NULL DEFAULT 1 CHECK (attempt >= 1),
    max_attempts   integer NOT NULL DEFAULT 1 CHECK (max_attempts >= 1),
    retry_on       text[] NOT NULL DEFAULT '{}',
    retry_seconds  double precision NOT NULL DEFAULT 0 CHECK (retry_seconds BETWEEN 0 AND 2592000),
    retry_backoff  double precision NOT NULL DEFAULT 1 CHECK (retry_backoff BETWEEN 1 AND 1000),
    not_before     timestamptz,
    crashes        integer NOT NULL DEFAULT 0 CHECK (crashes >= 0),
    invocation     integer NOT NULL DEFAULT 1 CHECK (invocation >= 1),
    claim          bigint NOT NULL DEFAULT 0,
    shape          text,
    bypassed       integer NOT NULL DEFAULT 0 CHECK (bypassed >= 0),
    dormant        boolean NOT NULL DEFAULT false,
    watched        boolean NOT NULL DEFAULT false,
    cancelled_at   timestamptz,
    submitted_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    waiting_since  timestamptz,
    admitted_at    timestamptz,
    claimed_at     timestamptz,
    ended_at       timestamptz,
    waited_seconds double precision NOT NULL DEFAULT 0 CHECK (waited_seconds >= 0),
    idle_since     timestamptz CHECK (idle_since IS NULL OR kind = 'resource'),
    flagged_at     timestamptz CHECK (flagged_at IS NULL OR idle_since IS NOT NULL),
    CHECK ((state IN ('succeeded', 'failed', 'cancelled')) = (ended_at IS NOT NULL)),
    CHECK ((state = 'waiting') = (waiting_since IS NOT NULL)),
    CHECK (state <> 'waiting' OR id <> unit_id OR shape IS NOT NULL),
    CHECK (holder_id IS NOT NULL OR (detached AND state NOT IN ('running', 'admitted'))),
    CHECK (holder_id IS NULL OR NOT detached OR state NOT IN ('ready', 'waiting'))
) WITH (fillfactor = 60);
CREATE UNIQUE INDEX executions_key ON jayrun.executions (key) WHERE key IS NOT NULL;
-- The only one by queue and shape: of two, the planner may take the one that leaves all waiters of a shape to be sorted.
CREATE INDEX executions_waiting ON jayrun.executions (queue_id, shape, priority DESC, age)
    WHERE state = 'waiting' AND id = unit_id;
CREATE INDEX executions_waiting_for_workers ON jayrun.executions (name, priority DESC, age)
    WHERE state = 'waiting' AND detached AND id = unit_id;
CREATE INDEX executions_ready ON jayrun.executions (name, priority DESC, age) WHERE state = 'ready';
CREATE UNIQUE INDEX executions_one_per_worker ON jayrun.executions (holder_id)
    WHERE detached AND id = unit_id AND state IN ('admitted', 'running');
CREATE INDEX executions_unit ON jayrun.executions (unit_id);
CREATE INDEX executions_held ON jayrun.executions (holder_id) WHERE state IN ('running', 'waiting', 'admitted');
COMMENT ON COLUMN jayrun.executions.unit_id IS
    'The execution that this one is admitted together with: itself, or the operator run whose resource it sets up';
COMMENT ON COLUMN jayrun.executions.age IS 'The place in the queue: who asked first has the lower number, for life';
COMMENT ON COLUMN jayrun.executions.detached IS
    'Submitted to the book, and run by any worker that knows the operator; else it lives and dies with its process';
COMMENT ON COLUMN jayrun.executions.queue_id IS 'The queue it waits in: its host, or 0 where any host may take it';
COMMENT ON COLUMN jayrun.executions.pinned_host_id IS 'The only host that may run it, if it was submitted for one';
COMMENT ON COLUMN jayrun.executions.claim IS 'Counts how often it was taken; only the newest claim may finish it';
COMMENT ON COLUMN jayrun.executions.crashes IS 'How often a worker process died running it';
COMMENT ON COLUMN jayrun.executions.watched IS 'Somebody waits for its end and is notified';
COMMENT ON COLUMN jayrun.executions.cancelled_at IS 'Since when it is asked to end';
COMMENT ON COLUMN jayrun.executions.idle_since IS
    'Since when the resource that it set up is cached in its process and in nobody''s use, as of its last word';
COMMENT ON COLUMN jayrun.executions.flagged_at IS
    'Since when its process is asked to tear that resource down, because it stands in the way of somebody who waits';
COMMENT ON COLUMN jayrun.executions.dormant IS
    'A waiter whose process did not claim a grant in time: no grants, nothing kept for it, until it shows life';

CREATE TABLE jayrun.placement_requests (
    execution_id       uuid NOT NULL REFERENCES jayrun.executions,
    position           integer NOT NULL CHECK (position >= 0),
    device             text NOT NULL CHECK (device IN ('gpu', 'tpu')),
    backend            text NOT NULL CHECK (backend IN ('cuda', 'mps', 'opencl', 'rocm', 'xla', 'xpu')),
    is_group           boolean NOT NULL,
    min_devices        integer NOT NULL CHECK (min_devices >= 1),
    max_devices        integer NOT NULL,
    prefer_max_devices boolean NOT NULL,
    group_bytes        bigint NOT NULL CHECK (group_bytes >= 0),
    per_device_bytes   bigint NOT NULL CHECK (per_device_bytes >= 0),
    exclusive          boolean NOT NULL,
    device_id          integer CHECK (device_id >= 0),
    PRIMARY KEY (execution_id, position),
    CHECK (max_devices >= min_devices),
    CHECK (exclusive OR group_bytes + per_device_bytes > 0)
);
COMMENT ON TABLE jayrun.placement_requests IS 'The recorded sequences: what each execution asked for, in order';

CREATE SEQUENCE jayrun.epochs;
CREATE TABLE jayrun.leases (
    id           uuid PRIMARY KEY,
    execution_id uuid NOT NULL,
    position     integer NOT NULL,
    invocation   integer NOT NULL,
    host_id      bigint NOT NULL REFERENCES jayrun.hosts,
    epoch        bigint NOT NULL DEFAULT nextval('jayrun.epochs'),
    holder_count integer NOT NULL DEFAULT 0 CHECK (holder_count >= 0),
    granted_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz,
    end_reason   text CHECK (end_reason IN ('released', 'reclaimed', 'returned')),
    CONSTRAINT leases_one_per_request UNIQUE (execution_id, position, invocation),
    FOREIGN KEY (execution_id, position) REFERENCES jayrun.placement_requests,
    CHECK ((ended_at IS NULL) = (end_reason IS NULL)),
    CHECK (ended_at IS NULL OR holder_count = 0)
) WITH (fillfactor = 50);

CREATE TABLE jayrun.lease_shares (
    lease_id     uuid NOT NULL REFERENCES jayrun.leases,
    device_id    bigint NOT NULL REFERENCES jayrun.devices,
    memory_bytes bigint NOT NULL CHECK (memory_bytes >= 0),
    exclusive    boolean NOT NULL,
    ended_at     timestamptz,
    folded_at    timestamptz,
    PRIMARY KEY (lease_id, device_id),
    CHECK (memory_bytes > 0 OR exclusive),
    CHECK (folded_at IS NULL OR ended_at IS NOT NULL)
) WITH (fillfactor = 50);
CREATE INDEX lease_shares_unfolded ON jayrun.lease_shares (device_id) WHERE folded_at IS NULL;
CREATE INDEX lease_shares_to_fold ON jayrun.lease_shares (device_id) WHERE ended_at IS NOT NULL AND folded_at IS NULL;

CREATE TABLE jayrun.lease_holders (
    lease_id   uuid NOT NULL REFERENCES jayrun.leases,
    holder_id  uuid NOT NULL REFERENCES jayrun.holders,
    hold       integer NOT NULL DEFAULT 0 CHECK (hold >= 0),
    since      timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at   timestamptz,
    end_reason text CHECK (end_reason IN ('released', 'reclaimed', 'returned')),
    PRIMARY KEY (lease_id, holder_id, hold),
    CHECK ((ended_at IS NULL) = (end_reason IS NULL))
) WITH (fillfactor = 50);
COMMENT ON COLUMN jayrun.lease_holders.hold IS
    '0 for the grant; else a number by which the holder tells apart that it joined, left and joined again';
CREATE INDEX lease_holders_live ON jayrun.lease_holders (holder_id) WHERE ended_at IS NULL;

CREATE TABLE jayrun.lease_events (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind         text NOT NULL CHECK (kind IN (
        'parked', 'granted', 'joined', 'left', 'released', 'reclaimed', 'returned', 'declared')),
    execution_id uuid,
    lease_id     uuid,
    holder_id    uuid,
    epoch        bigint,
    detail       text
);
CREATE INDEX lease_events_lease ON jayrun.lease_events (lease_id) WHERE lease_id IS NOT NULL;
CREATE INDEX lease_events_declared ON jayrun.lease_events (holder_id) WHERE kind = 'declared';

CREATE TABLE jayrun.quarantines (
    lease_id     uuid NOT NULL REFERENCES jayrun.leases,
    device_id    bigint NOT NULL REFERENCES jayrun.devices,
    memory_bytes bigint NOT NULL CHECK (memory_bytes >= 0),
    since        timestamptz NOT NULL,
    until        timestamptz NOT NULL,
    ended_at     timestamptz,
    PRIMARY KEY (lease_id, device_id)
);
CREATE INDEX quarantines_open ON jayrun.quarantines (device_id) WHERE ended_at IS NULL;
COMMENT ON TABLE jayrun.quarantines IS
    'Shares of leases that ended uncleanly, withheld until the driver shows their memory free, or the time is over';

-- What was seen of the hardware at the last look; overwritten by the next. Nothing here refers to leases by a key, so
-- that no lock on them is taken either.
CREATE TABLE jayrun.device_observations (
    device_id         bigint PRIMARY KEY REFERENCES jayrun.devices,
    observed_at       timestamptz NOT NULL,
    finding           text NOT NULL CHECK (finding IN ('ok', 'unreadable')),
    detail            text NOT NULL,
    shows_processes   boolean NOT NULL,
    used_bytes        bigint,
    usable_bytes      bigint,
    foreign_bytes     bigint
);
COMMENT ON COLUMN jayrun.device_observations.usable_bytes IS
    'What the driver reports in all, without what it reserves for itself; null: it does not say';
COMMENT ON COLUMN jayrun.device_observations.foreign_bytes IS
    'What processes without a lease use, but those that are passed over; null: something, and nobody can tell how much';
CREATE TABLE jayrun.lease_observations (
    device_id    bigint NOT NULL REFERENCES jayrun.devices,
    lease_id     uuid NOT NULL,
    finding      text NOT NULL CHECK (finding IN ('ok', 'over-use', 'idle-lease', 'unreadable')),
    detail       text NOT NULL,
    used_bytes   bigint,
    leased_bytes bigint NOT NULL,
    unused_since timestamptz,
    PRIMARY KEY (device_id, lease_id)
);
COMMENT ON COLUMN jayrun.lease_observations.unused_since IS
    'Since when nothing of the device was seen to be used by the lease; null: something was, or nobody could tell';
CREATE TABLE jayrun.process_observations (
    device_id   bigint NOT NULL REFERENCES jayrun.devices,
    pid         integer NOT NULL,
    start_ticks bigint,
    finding     text CHECK (finding IN ('ok', 'orphan', 'squatter')),
    detail      text NOT NULL,
    lease_id    uuid,
    user_name   text NOT NULL,
    command     text NOT NULL,
    used_bytes  bigint,
    first_seen  timestamptz NOT NULL,
    PRIMARY KEY (device_id, pid)
);
COMMENT ON TABLE jayrun.process_observations IS
    'The processes that the driver shows on a device, by their numbers on the host';
COMMENT ON COLUMN jayrun.process_observations.finding IS 'Null for a process that counts to a live lease, which tells of it';
COMMENT ON COLUMN jayrun.process_observations.lease_id IS 'The lease that it counts to, or the ended one that it comes from';
"""

# How the functions find their rows. A plan lasts as long as its session, and is older than what the tables have grown
# to; made while a table had one page it may go through all of it, once or (in a join) for each row. So nothing is left to
# the planner's knowledge of sizes: whole tables are not scanned (`enable_seqscan`), and rows that have a key are found
# one by one and by that key, in a statement that reads no other table and asks for no order that another index has.
# `state || ''` keeps the indexes by state out of it. tests/store/test_plans.py reads what is read.

# Bodies are quoted with $f$.
TRIGGERS = """
CREATE FUNCTION jayrun.refuse() RETURNS trigger LANGUAGE plpgsql AS $f$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation',
        MESSAGE = format('jayrun.%s: %s', TG_TABLE_NAME, TG_ARGV[0]), CONSTRAINT = TG_NAME;
END $f$;

CREATE FUNCTION jayrun.quarantined_bytes(the_device bigint) RETURNS bigint LANGUAGE plpgsql STABLE AS $f$
BEGIN
    RETURN (SELECT coalesce(sum(memory_bytes), 0) FROM jayrun.quarantines
            WHERE device_id = the_device AND ended_at IS NULL AND until > clock_timestamp());
END $f$;
COMMENT ON FUNCTION jayrun.quarantined_bytes IS 'What of a device is in quarantine now';

-- Devices: counters move only with shares, never above the capacity.
CREATE FUNCTION jayrun.shares_to_counters() RETURNS trigger LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
DECLARE
    r record;
BEGIN
    IF TG_OP = 'INSERT' THEN
        FOR r IN
            SELECT device_id, sum(memory_bytes) AS memory_bytes, count(*) AS shares,
                   count(*) FILTER (WHERE exclusive) AS exclusives
            FROM new_shares WHERE folded_at IS NULL GROUP BY device_id ORDER BY device_id
        LOOP
            UPDATE jayrun.devices SET reserved_bytes = reserved_bytes + r.memory_bytes,
                share_count = share_count + r.shares, exclusive_count = exclusive_count + r.exclusives
            WHERE id = r.device_id;
        END LOOP;
    ELSIF EXISTS (SELECT FROM new_shares WHERE folded_at IS NOT NULL) THEN
        FOR r IN
            SELECT n.device_id, sum(n.memory_bytes) AS memory_bytes, count(*) AS shares,
                   count(*) FILTER (WHERE n.exclusive) AS exclusives
            FROM new_shares n JOIN old_shares o USING (lease_id, device_id)
            WHERE n.folded_at IS NOT NULL AND o.folded_at IS NULL GROUP BY n.device_id ORDER BY n.device_id
        LOOP
            -- What goes into quarantine is withheld in the same breath.
            UPDATE jayrun.devices SET reserved_bytes = reserved_bytes - r.memory_bytes,
                share_count = share_count - r.shares, exclusive_count = exclusive_count - r.exclusives,
                withheld_bytes = greatest(withheld_bytes, jayrun.quarantined_bytes(r.device_id))
            WHERE id = r.device_id;
        END LOOP;
    END IF;
    RETURN NULL;
END $f$;
CREATE TRIGGER shares_added AFTER INSERT ON jayrun.lease_shares
    REFERENCING NEW TABLE AS new_shares FOR EACH STATEMENT EXECUTE FUNCTION jayrun.shares_to_counters();
CREATE TRIGGER shares_folded AFTER UPDATE ON jayrun.lease_shares
    REFERENCING OLD TABLE AS old_shares NEW TABLE AS new_shares
    FOR EACH STATEMENT EXECUTE FUNCTION jayrun.shares_to_counters();

CREATE TRIGGER devices_capacity BEFORE UPDATE ON jayrun.devices FOR EACH ROW
    WHEN (NEW.reserved_bytes > OLD.reserved_bytes AND NEW.reserved_bytes > NEW.capacity_bytes)
    EXECUTE FUNCTION jayrun.refuse('the increase would reserve more than the capacity');
CREATE TRIGGER devices_counters BEFORE UPDATE ON jayrun.devices FOR EACH ROW
    WHEN ((NEW.reserved_bytes, NEW.share_count, NEW.exclusive_count)
          IS DISTINCT FROM (OLD.reserved_bytes, OLD.share_count, OLD.exclusive_count) AND pg_trigger_depth() = 0)
    EXECUTE FUNCTION jayrun.refuse('counters move only with lease_shares');
CREATE TRIGGER devices_start_empty BEFORE INSERT ON jayrun.devices FOR EACH ROW
    WHEN (NEW.reserved_bytes <> 0 OR NEW.share_count <> 0 OR NEW.exclusive_count <> 0)
    EXECUTE FUNCTION jayrun.refuse('a device starts with nothing reserved');

-- Shares: born live on a live lease, end with their lease, fold after that; nothing else about them changes.
CREATE FUNCTION jayrun.share_needs_live_lease() RETURNS trigger LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT lease_id, bool_or(ended_at IS NOT NULL) AS ended FROM new_shares GROUP BY lease_id LOOP
        IF r.ended OR EXISTS (SELECT FROM jayrun.leases WHERE id = r.lease_id AND ended_at IS NOT NULL) THEN
            RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME,
                MESSAGE = 'jayrun.lease_shares: a share is added live, to a lease that has not ended';
        END IF;
    END LOOP;
    RETURN NULL;
END $f$;
CREATE TRIGGER shares_on_live_lease AFTER INSERT ON jayrun.lease_shares
    REFERENCING NEW TABLE AS new_shares FOR EACH STATEMENT EXECUTE FUNCTION jayrun.share_needs_live_lease();
CREATE TRIGGER shares_fixed BEFORE UPDATE ON jayrun.lease_shares FOR EACH ROW
    WHEN ((NEW.lease_id, NEW.device_id, NEW.memory_bytes, NEW.exclusive)
          IS DISTINCT FROM (OLD.lease_id, OLD.device_id, OLD.memory_bytes, OLD.exclusive)
          OR (OLD.ended_at IS NOT NULL AND NEW.ended_at IS DISTINCT FROM OLD.ended_at)
          OR (OLD.folded_at IS NOT NULL AND NEW.folded_at IS DISTINCT FROM OLD.folded_at))
    EXECUTE FUNCTION jayrun.refuse('what was granted does not change, and what ended stays ended');
CREATE TRIGGER shares_end_with_lease BEFORE UPDATE ON jayrun.lease_shares FOR EACH ROW
    WHEN (OLD.ended_at IS NULL AND NEW.ended_at IS NOT NULL AND pg_trigger_depth() = 0)
    EXECUTE FUNCTION jayrun.refuse('a share ends with its lease');
CREATE TRIGGER shares_kept BEFORE DELETE ON jayrun.lease_shares FOR EACH ROW
    EXECUTE FUNCTION jayrun.refuse('shares are history and are not deleted');
CREATE TRIGGER shares_not_truncated BEFORE TRUNCATE ON jayrun.lease_shares FOR EACH STATEMENT
    EXECUTE FUNCTION jayrun.refuse('shares are history and are not deleted');

-- Holders of a lease: the last one out ends it. The counter makes two that leave at once meet on the lease's row.
CREATE FUNCTION jayrun.holders_to_leases() RETURNS trigger LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
DECLARE
    r record;
    holders integer;
BEGIN
    IF TG_OP = 'INSERT' THEN
        FOR r IN SELECT lease_id, holder_id, ended_at FROM new_holders ORDER BY lease_id LOOP
            IF r.ended_at IS NOT NULL
               OR EXISTS (SELECT FROM jayrun.leases WHERE id = r.lease_id AND ended_at IS NOT NULL)
               OR EXISTS (SELECT FROM jayrun.holders WHERE id = r.holder_id AND state = 'ended') THEN
                RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME,
                    MESSAGE = 'jayrun.lease_holders: a live holder joins a lease that has not ended';
            END IF;
            UPDATE jayrun.leases SET holder_count = holder_count + 1 WHERE id = r.lease_id RETURNING holder_count INTO holders;
            IF holders > 1 THEN
                INSERT INTO jayrun.lease_events (kind, execution_id, lease_id, holder_id, epoch)
                SELECT 'joined', execution_id, id, r.holder_id, epoch FROM jayrun.leases WHERE id = r.lease_id;
            END IF;
        END LOOP;
    ELSE
        FOR r IN
            SELECT n.lease_id, count(*) AS leavers, max(n.ended_at) AS ended_at, max(n.end_reason) AS end_reason
            FROM new_holders n JOIN old_holders o USING (lease_id, holder_id, hold)
            WHERE n.ended_at IS NOT NULL AND o.ended_at IS NULL GROUP BY n.lease_id ORDER BY n.lease_id
        LOOP
            -- Stronger than the update's own lock: it waits for who joins the lease or adds a share, and they for it.
            PERFORM FROM jayrun.leases WHERE id = r.lease_id FOR UPDATE;
            UPDATE jayrun.leases SET holder_count = holder_count - r.leavers,
                ended_at = CASE WHEN holder_count = r.leavers THEN r.ended_at END,
                end_reason = CASE WHEN holder_count = r.leavers THEN r.end_reason END
            WHERE id = r.lease_id RETURNING holder_count INTO holders;
            IF holders > 0 THEN  -- else the lease has ended, which is told as that
                INSERT INTO jayrun.lease_events (kind, execution_id, lease_id, holder_id, epoch)
                SELECT 'left', l.execution_id, l.id, n.holder_id, l.epoch
                FROM new_holders n JOIN old_holders o USING (lease_id, holder_id, hold)
                CROSS JOIN LATERAL (SELECT * FROM jayrun.leases WHERE id = r.lease_id OFFSET 0) l
                WHERE n.lease_id = r.lease_id AND n.ended_at IS NOT NULL AND o.ended_at IS NULL;
            END IF;
        END LOOP;
    END IF;
    RETURN NULL;
END $f$;
CREATE TRIGGER holders_joined AFTER INSERT ON jayrun.lease_holders
    REFERENCING NEW TABLE AS new_holders FOR EACH STATEMENT EXECUTE FUNCTION jayrun.holders_to_leases();
CREATE TRIGGER holders_left AFTER UPDATE ON jayrun.lease_holders
    REFERENCING OLD TABLE AS old_holders NEW TABLE AS new_holders
    FOR EACH STATEMENT EXECUTE FUNCTION jayrun.holders_to_leases();
CREATE TRIGGER lease_holders_fixed BEFORE UPDATE ON jayrun.lease_holders FOR EACH ROW
    WHEN (OLD.ended_at IS NOT NULL OR (NEW.lease_id, NEW.holder_id, NEW.hold) IS DISTINCT FROM (OLD.lease_id, OLD.holder_id, OLD.hold))
    EXECUTE FUNCTION jayrun.refuse('a holder leaves a lease once');
CREATE TRIGGER lease_holders_kept BEFORE DELETE ON jayrun.lease_holders FOR EACH ROW
    EXECUTE FUNCTION jayrun.refuse('holders of leases are history and are not deleted');
CREATE TRIGGER lease_holders_not_truncated BEFORE TRUNCATE ON jayrun.lease_holders FOR EACH STATEMENT
    EXECUTE FUNCTION jayrun.refuse('holders of leases are history and are not deleted');

-- Leases: end once, with their shares, and leave a line in the log.
CREATE FUNCTION jayrun.lease_granted() RETURNS trigger LANGUAGE plpgsql AS $f$
BEGIN
    INSERT INTO jayrun.lease_events (kind, execution_id, lease_id, epoch)
    SELECT 'granted', execution_id, id, epoch FROM new_leases ORDER BY epoch;
    RETURN NULL;
END $f$;
CREATE TRIGGER leases_granted AFTER INSERT ON jayrun.leases
    REFERENCING NEW TABLE AS new_leases FOR EACH STATEMENT EXECUTE FUNCTION jayrun.lease_granted();
CREATE FUNCTION jayrun.lease_ended() RETURNS trigger LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
BEGIN
    UPDATE jayrun.lease_shares SET ended_at = NEW.ended_at WHERE lease_id = NEW.id;
    IF NEW.end_reason = 'reclaimed' THEN
        INSERT INTO jayrun.quarantines (lease_id, device_id, memory_bytes, since, until)
        SELECT s.lease_id, s.device_id,
               CASE WHEN s.exclusive THEN (SELECT capacity_bytes FROM jayrun.devices WHERE id = s.device_id)
                    ELSE s.memory_bytes END,
               clock_timestamp(), clock_timestamp() + make_interval(secs => b.quarantine_seconds)
        FROM jayrun.settings b CROSS JOIN LATERAL (
            SELECT * FROM jayrun.lease_shares WHERE lease_id = NEW.id OFFSET 0) s
        WHERE b.only_row AND b.quarantine_seconds > 0;
    END IF;
    INSERT INTO jayrun.lease_events (kind, execution_id, lease_id, epoch)
    VALUES (NEW.end_reason, NEW.execution_id, NEW.id, NEW.epoch);
    RETURN NULL;
END $f$;
CREATE TRIGGER leases_ended AFTER UPDATE ON jayrun.leases FOR EACH ROW
    WHEN (OLD.ended_at IS NULL AND NEW.ended_at IS NOT NULL) EXECUTE FUNCTION jayrun.lease_ended();
CREATE TRIGGER leases_fixed BEFORE UPDATE ON jayrun.leases FOR EACH ROW
    WHEN (OLD.ended_at IS NOT NULL
          OR (NEW.id, NEW.execution_id, NEW.position, NEW.invocation, NEW.host_id, NEW.epoch, NEW.granted_at)
          IS DISTINCT FROM (OLD.id, OLD.execution_id, OLD.position, OLD.invocation, OLD.host_id, OLD.epoch, OLD.granted_at))
    EXECUTE FUNCTION jayrun.refuse('a lease ends once, and nothing else about it changes');
CREATE TRIGGER leases_end_with_last_holder BEFORE UPDATE ON jayrun.leases FOR EACH ROW
    WHEN ((NEW.holder_count, NEW.ended_at) IS DISTINCT FROM (OLD.holder_count, OLD.ended_at) AND pg_trigger_depth() = 0)
    EXECUTE FUNCTION jayrun.refuse('a lease ends when its last holder leaves it (lease_holders)');
CREATE TRIGGER leases_start_live BEFORE INSERT ON jayrun.leases FOR EACH ROW
    WHEN (NEW.ended_at IS NOT NULL OR NEW.holder_count <> 0)
    EXECUTE FUNCTION jayrun.refuse('a lease starts live, without holders');
CREATE TRIGGER leases_kept BEFORE DELETE ON jayrun.leases FOR EACH ROW
    EXECUTE FUNCTION jayrun.refuse('leases are history and are not deleted');

-- States move along the legal moves only.
CREATE TRIGGER executions_moves BEFORE UPDATE OF state ON jayrun.executions FOR EACH ROW
    WHEN (NEW.state <> OLD.state AND (OLD.state || '>' || NEW.state) NOT IN (
        'ready>running', 'ready>cancelled',
        'running>waiting', 'running>ready', 'running>succeeded', 'running>failed', 'running>cancelled',
        'waiting>admitted', 'waiting>ready', 'waiting>failed', 'waiting>cancelled',
        'admitted>running', 'admitted>waiting', 'admitted>failed', 'admitted>cancelled',
        'failed>ready', 'cancelled>ready'))
    EXECUTE FUNCTION jayrun.refuse('illegal change of state');
CREATE FUNCTION jayrun.execution_parked() RETURNS trigger LANGUAGE plpgsql AS $f$
BEGIN
    INSERT INTO jayrun.lease_events (kind, execution_id, holder_id) VALUES ('parked', NEW.id, NEW.holder_id);
    RETURN NULL;
END $f$;
CREATE TRIGGER executions_asked AFTER INSERT ON jayrun.executions FOR EACH ROW
    WHEN (NEW.state = 'waiting') EXECUTE FUNCTION jayrun.execution_parked();
CREATE TRIGGER executions_parked AFTER UPDATE OF state ON jayrun.executions FOR EACH ROW
    WHEN (NEW.state = 'waiting' AND OLD.state <> 'waiting') EXECUTE FUNCTION jayrun.execution_parked();
CREATE TRIGGER holders_moves BEFORE UPDATE ON jayrun.holders FOR EACH ROW
    WHEN (OLD.state = 'ended') EXECUTE FUNCTION jayrun.refuse('a holder ends once');
CREATE FUNCTION jayrun.holder_ends() RETURNS trigger LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
BEGIN
    -- Stronger than the update's own lock: it waits for whoever is just now giving this holder a lease, and makes those
    -- who saw it alive, and have not written yet, start anew. What was given while it waited is seen only by a statement
    -- with a snapshot of its own.
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME,
            MESSAGE = format('jayrun.holders: holder %s ends in a transaction of READ COMMITTED only', NEW.id),
            HINT = 'Begin the transaction with BEGIN ISOLATION LEVEL READ COMMITTED.';
    END IF;
    PERFORM FROM jayrun.holders WHERE id = NEW.id FOR UPDATE;
    IF EXISTS (SELECT FROM jayrun.lease_holders WHERE holder_id = NEW.id AND ended_at IS NULL) THEN
        RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME,
            MESSAGE = format('jayrun.holders: holder %s still holds leases', NEW.id);
    END IF;
    RETURN NEW;
END $f$;
CREATE TRIGGER holders_end_without_leases BEFORE UPDATE ON jayrun.holders FOR EACH ROW
    WHEN (NEW.state = 'ended' AND OLD.state <> 'ended') EXECUTE FUNCTION jayrun.holder_ends();
CREATE TRIGGER holders_kept BEFORE DELETE ON jayrun.holders FOR EACH ROW
    WHEN (OLD.state = 'alive') EXECUTE FUNCTION jayrun.refuse('a live holder is not deleted');

-- Requests and events are written once.
CREATE TRIGGER requests_fixed BEFORE UPDATE OR DELETE ON jayrun.placement_requests FOR EACH ROW
    EXECUTE FUNCTION jayrun.refuse('a recorded sequence does not change');
CREATE TRIGGER events_fixed BEFORE UPDATE OR DELETE ON jayrun.lease_events FOR EACH ROW
    EXECUTE FUNCTION jayrun.refuse('events are append-only');
CREATE TRIGGER events_not_truncated BEFORE TRUNCATE ON jayrun.lease_events FOR EACH STATEMENT
    EXECUTE FUNCTION jayrun.refuse('events are append-only');
"""

# The book's own functions: the hot statements, planned once per session whatever stands between it and the client.
FUNCTIONS = """
CREATE FUNCTION jayrun.tell(names text[]) RETURNS void LANGUAGE plpgsql AS $f$
BEGIN
    PERFORM pg_notify('jayrun:' || name, '') FROM unnest(names) name;
END $f$;
COMMENT ON FUNCTION jayrun.tell IS
    'Calls holders, executions that are watched, or all workers, each on the channel jayrun:NAME';

CREATE FUNCTION jayrun.in_reach_since(the_host bigint) RETURNS timestamptz LANGUAGE sql STABLE AS $f$
    SELECT greatest(pg_postmaster_start_time(), min(h.watched_since)) FROM jayrun.hosts h, jayrun.settings s
    WHERE h.id <> the_host AND h.seen_at > clock_timestamp() - make_interval(secs => s.holder_ttl_seconds / 2)
$f$;
COMMENT ON FUNCTION jayrun.in_reach_since IS
    'Since when the book has been in reach as far as it can tell: since its server started, and the first of the other hosts that are in touch was; silence before that is not the host''s own';

CREATE FUNCTION jayrun.to_withhold(the_device bigint) RETURNS bigint LANGUAGE plpgsql STABLE
SET enable_seqscan = off AS $f$
DECLARE
    b jayrun.settings%ROWTYPE;
    d jayrun.devices%ROWTYPE;
    o jayrun.device_observations%ROWTYPE;
    taken bigint := 0;
BEGIN
    SELECT * INTO b FROM jayrun.settings WHERE only_row;
    SELECT * INTO d FROM jayrun.devices WHERE id = the_device;
    -- What nobody has looked at for three looks is not known any more. What others use beyond the capacity, in what is
    -- reserved for them, is not granted anyway.
    IF b.respect_observed THEN
        SELECT * INTO o FROM jayrun.device_observations
        WHERE device_id = the_device AND observed_at > clock_timestamp() - make_interval(secs => 3 * b.look_seconds);
        IF FOUND THEN
            taken := CASE WHEN o.foreign_bytes IS NULL THEN d.capacity_bytes ELSE
                greatest(o.foreign_bytes - greatest(coalesce(o.usable_bytes - d.capacity_bytes, 0), 0), 0) END;
        END IF;
    END IF;
    RETURN greatest(taken, CASE WHEN b.quarantine_seconds > 0 THEN jayrun.quarantined_bytes(the_device) ELSE 0 END);
END $f$;
COMMENT ON FUNCTION jayrun.to_withhold IS
    'What is to be withheld of a device now: used without a lease (if that is respected), or in quarantine; whichever is more';

CREATE FUNCTION jayrun.withhold(the_host bigint) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
DECLARE
    r record;
    fell boolean := false;
BEGIN
    FOR r IN
        SELECT d.id, d.withheld_bytes AS was, jayrun.to_withhold(d.id) AS is_now
        FROM jayrun.devices d WHERE d.host_id = the_host ORDER BY d.id
    LOOP
        UPDATE jayrun.quarantines SET ended_at = least(until, clock_timestamp())
        WHERE device_id = r.id AND ended_at IS NULL
          AND (until <= clock_timestamp() OR (SELECT b.quarantine_seconds = 0 FROM jayrun.settings b WHERE b.only_row));
        IF r.is_now <> r.was THEN
            UPDATE jayrun.devices SET withheld_bytes = r.is_now WHERE id = r.id;
            fell := fell OR r.is_now < r.was;
        END IF;
    END LOOP;
    RETURN fell;
END $f$;
COMMENT ON FUNCTION jayrun.withhold IS
    'Behind the gate: withholds on a host what is to be withheld now; returns whether it is less than before anywhere';

CREATE FUNCTION jayrun.withholds_too_much(the_host bigint) RETURNS boolean LANGUAGE plpgsql STABLE
SET enable_seqscan = off AS $f$
BEGIN
    RETURN EXISTS (SELECT FROM jayrun.devices d WHERE d.host_id = the_host AND d.withheld_bytes > 0
                   AND jayrun.to_withhold(d.id) < d.withheld_bytes);
END $f$;
COMMENT ON FUNCTION jayrun.withholds_too_much IS 'Whether jayrun.withhold would let go of something on the host now';

CREATE FUNCTION jayrun.write_observations(the_host bigint, d jsonb) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
DECLARE
    r record;
    moment timestamptz := clock_timestamp();
BEGIN
    FOR r IN
        SELECT * FROM jsonb_to_recordset(d -> 'devices') AS x (
            id bigint, finding text, detail text, shows_processes boolean, used_bytes bigint, usable_bytes bigint,
            foreign_bytes bigint)
        WHERE EXISTS (SELECT FROM jayrun.devices e WHERE e.id = x.id AND e.host_id = the_host) ORDER BY x.id
    LOOP
        INSERT INTO jayrun.device_observations
        VALUES (r.id, moment, r.finding, r.detail, r.shows_processes, r.used_bytes, r.usable_bytes, r.foreign_bytes)
        ON CONFLICT (device_id) DO UPDATE SET observed_at = excluded.observed_at, finding = excluded.finding,
            detail = excluded.detail, shows_processes = excluded.shows_processes, used_bytes = excluded.used_bytes,
            usable_bytes = excluded.usable_bytes, foreign_bytes = excluded.foreign_bytes;
        DELETE FROM jayrun.lease_observations WHERE device_id = r.id;
        DELETE FROM jayrun.process_observations WHERE device_id = r.id;
    END LOOP;
    INSERT INTO jayrun.lease_observations (device_id, lease_id, finding, detail, used_bytes, leased_bytes, unused_since)
    SELECT x.device_id, x.lease_id, x.finding, x.detail, x.used_bytes, x.leased_bytes,
           CASE WHEN x.is_unused THEN coalesce(x.unused_since, moment) END
    FROM jsonb_to_recordset(d -> 'leases') AS x (
        device_id bigint, lease_id uuid, finding text, detail text, used_bytes bigint, leased_bytes bigint,
        is_unused boolean, unused_since timestamptz);
    INSERT INTO jayrun.process_observations (
        device_id, pid, start_ticks, finding, detail, lease_id, user_name, command, used_bytes, first_seen)
    SELECT x.device_id, x.pid, x.start_ticks, x.finding, x.detail, x.lease_id, x.user_name, x.command, x.used_bytes,
           coalesce(x.first_seen, moment)
    FROM jsonb_to_recordset(d -> 'processes') AS x (
        device_id bigint, pid integer, start_ticks bigint, finding text, detail text, lease_id uuid, user_name text,
        command text, used_bytes bigint, first_seen timestamptz);
    FOR r IN SELECT * FROM jsonb_to_recordset(d -> 'given_back') AS x (device_id bigint, lease_id uuid) LOOP
        UPDATE jayrun.quarantines SET ended_at = moment
        WHERE lease_id = r.lease_id AND device_id = r.device_id AND ended_at IS NULL;
    END LOOP;
    RETURN jayrun.withhold(the_host);
END $f$;
COMMENT ON FUNCTION jayrun.write_observations IS
    'Behind the gate: what was seen of devices of a host takes the place of what was seen before; then jayrun.withhold';

CREATE FUNCTION jayrun.picture(
    the_host bigint, of_each integer, the_unit uuid, the_execution uuid, the_position integer, the_invocation integer,
    the_holder uuid,
    OUT bypass_limit integer, OUT grants_per_batch integer, OUT devices json, OUT elsewhere boolean, OUT waiting json,
    OUT workers json, OUT own_state text, OUT own_unit json, OUT own_lease json, OUT own_alive boolean,
    OUT own_visible jsonb)
LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
DECLARE
    is_silent boolean;
BEGIN
    UPDATE jayrun.lease_shares SET folded_at = clock_timestamp()
    WHERE ended_at IS NOT NULL AND folded_at IS NULL
      AND device_id IN (SELECT d.id FROM jayrun.devices d WHERE d.host_id = the_host);
    -- Nothing is granted on a silent host: nobody would come for it. Who asks there shows that it is not. Whoever ends
    -- the asking holder from here on makes this admission start anew (jayrun.holder_ends); of another boot than its
    -- host, it runs on a machine whose place another has taken.
    SELECT s.bypass_limit, s.grants_per_batch, EXISTS (SELECT FROM jayrun.hosts x WHERE x.id <> the_host), x.is_silent,
        o.state || '' = 'alive' AND o.boot_id = h.boot_id, o.visible,
        (SELECT json_agg(json_build_array(d.id, d.host_index, d.kind, d.backends, d.capacity_bytes, d.reserved_bytes,
                                          d.share_count, d.exclusive_count > 0, d.exclusive_only,
                                          CASE WHEN x.is_silent OR d.fault IS NOT NULL THEN 'offline' ELSE d.state END,
                                          d.withheld_bytes, d.parent_uuid IS NOT NULL, d.island, d.fault, d.device_uuid)
                         ORDER BY d.kind, d.host_index)
         FROM jayrun.devices d WHERE d.host_id = the_host AND d.removed_at IS NULL)
    INTO bypass_limit, grants_per_batch, elsewhere, is_silent, own_alive, own_visible, devices
    FROM jayrun.settings s CROSS JOIN LATERAL (SELECT * FROM jayrun.hosts WHERE id = the_host OFFSET 0) h
    CROSS JOIN LATERAL (
        SELECT the_holder IS NULL AND h.seen_at < clock_timestamp() - make_interval(secs => s.holder_ttl_seconds)
               AS is_silent OFFSET 0) x
    LEFT JOIN LATERAL (SELECT * FROM jayrun.holders WHERE id = the_holder OFFSET 0) o ON true;
    -- The first waiters of every shape (a loose index scan finds the shapes), at most so many of each: equal ones are
    -- equally served or not, and those further behind are reached when those before them have gone.
    IF EXISTS (SELECT FROM jayrun.executions w
               WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.queue_id IN (0, the_host))
    THEN
        WITH RECURSIVE shapes (queue_id, shape) AS (
            SELECT q, (SELECT w.shape FROM jayrun.executions w
                       WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.queue_id = q ORDER BY w.shape LIMIT 1)
            FROM unnest(ARRAY[the_host, 0]) q
            UNION ALL
            SELECT s.queue_id, (SELECT w.shape FROM jayrun.executions w
                                WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.queue_id = s.queue_id
                                  AND w.shape > s.shape
                                ORDER BY w.shape LIMIT 1)
            FROM shapes s WHERE s.shape IS NOT NULL)
        SELECT json_agg(json_build_array(w.id, w.priority, w.age, w.bypassed, w.shape,
                                         CASE WHEN w.detached THEN w.name END, w.host_id, w.holder_id, o.boot_id,
                                         o.pid_namespace, o.pid, o.start_ticks, m.requests, o.visible, most.bypassed))
        INTO waiting
        FROM shapes
        CROSS JOIN LATERAL (  -- of those that one batch may reach; by the same index, in the same order
            SELECT max(b.bypassed) AS bypassed FROM (
                SELECT w.bypassed FROM jayrun.executions w
                WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.queue_id = shapes.queue_id
                  AND w.shape = shapes.shape AND NOT w.dormant
                ORDER BY w.priority DESC, w.age LIMIT grants_per_batch) b) most
        CROSS JOIN LATERAL (
            SELECT w.* FROM jayrun.executions w
            WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.queue_id = shapes.queue_id AND w.shape = shapes.shape
              AND NOT w.dormant
            ORDER BY w.priority DESC, w.age LIMIT least(of_each, grants_per_batch)) w
        LEFT JOIN LATERAL (SELECT * FROM jayrun.holders WHERE id = w.holder_id OFFSET 0) o ON true
        CROSS JOIN LATERAL (
            SELECT json_agg(json_build_array(m.id, q.position, m.invocation, q.device, q.backend, q.is_group, q.min_devices, q.max_devices, q.prefer_max_devices, q.group_bytes, q.per_device_bytes, q.exclusive, q.device_id)
                            ORDER BY m.id = m.unit_id, m.age, q.position) AS requests
            FROM jayrun.executions m CROSS JOIN LATERAL (  -- OFFSET 0: for each by its key, and not as a join
                SELECT * FROM jayrun.placement_requests WHERE execution_id = m.id OFFSET 0) q
            WHERE m.unit_id = w.id AND m.state || '' = 'waiting') m;
        SELECT json_agg(json_build_array(o.id, o.operators, o.boot_id, o.pid_namespace, o.pid, o.start_ticks,
                                         o.visible)
                        ORDER BY o.registered_at)
        INTO workers
        FROM jayrun.holders o
        WHERE o.host_id = the_host AND o.state = 'alive' AND o.operators <> '{}' AND NOT o.silent AND NOT is_silent
          AND NOT EXISTS (SELECT FROM jayrun.executions t WHERE t.holder_id = o.id AND t.detached AND t.id = t.unit_id
                          AND t.state IN ('admitted', 'running'));
    END IF;
    IF the_execution IS NOT NULL THEN
        SELECT e.state INTO own_state FROM jayrun.executions e WHERE e.id = the_execution;
        SELECT json_build_array(e.state, e.holder_id, e.cancelled_at IS NOT NULL) INTO own_unit
        FROM jayrun.executions e WHERE e.id = the_unit;
        IF own_state IS NOT NULL THEN
            SELECT json_build_array(l.id, l.end_reason) INTO own_lease FROM jayrun.leases l
            WHERE l.execution_id = the_execution AND l.position = the_position AND l.invocation = the_invocation;
        END IF;
    END IF;
END $f$;
COMMENT ON FUNCTION jayrun.picture IS
    'Behind the gate: folds what ended on the host, then reads its devices, its queue, and what became of one request';

CREATE FUNCTION jayrun.fail_waiting(the_unit uuid, why jsonb) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
BEGIN
    -- A detached one whose policy retries this failure is ready again; set-ups end with the invocation they belonged to.
    UPDATE jayrun.executions e SET
        state = CASE WHEN e.id <> e.unit_id THEN 'cancelled' WHEN e.detached AND e.attempt < e.max_attempts
                     AND why ->> 'type' = ANY (e.retry_on) THEN 'ready' ELSE 'failed' END,
        waited_seconds = e.waited_seconds + extract(epoch FROM clock_timestamp() - e.waiting_since),
        waiting_since = NULL,
        ended_at = CASE WHEN NOT (e.id = e.unit_id AND e.detached AND e.attempt < e.max_attempts
                                  AND why ->> 'type' = ANY (e.retry_on)) THEN clock_timestamp() END,
        failure = why || jsonb_build_object('attempt', e.attempt, 'at', clock_timestamp())
    WHERE e.unit_id = the_unit AND e.state || '' = 'waiting';
    IF FOUND THEN
        UPDATE jayrun.executions e SET attempt = e.attempt + 1,
            not_before = clock_timestamp() + make_interval(secs =>
                least(e.retry_seconds * exp(least(ln(e.retry_backoff) * (e.attempt - 1), 40)), 2592000))
        WHERE e.id = the_unit AND e.state || '' = 'ready';
        IF FOUND THEN
            PERFORM jayrun.tell(ARRAY['workers']);
        END IF;
    END IF;
END $f$;
COMMENT ON FUNCTION jayrun.fail_waiting IS 'A waiting unit will never be admitted: it fails, by its retry policy';

CREATE FUNCTION jayrun.write_pass(d jsonb) RETURNS TABLE (lease_id uuid, lease_epoch bigint) LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
DECLARE
    moment timestamptz := clock_timestamp();  -- one for all members of a unit, by which they are known to belong together
    r record;
BEGIN
    IF d ? 'executions' THEN
        INSERT INTO jayrun.executions (
            id, kind, detached, name, unit_id, host_id, pinned_host_id, holder_id, state, priority, inputs, shape,
            invocation, waiting_since)
        SELECT x.id, x.kind, x.detached, x.name, x.unit_id, x.host_id, x.pinned_host_id, x.holder_id, x.state,
               x.priority, x.inputs, x.shape, x.invocation,
               CASE WHEN x.state = 'waiting' THEN clock_timestamp() END
        FROM jsonb_to_recordset(d -> 'executions') AS x (
            id uuid, kind text, detached boolean, name text, unit_id uuid, host_id bigint, pinned_host_id bigint,
            holder_id uuid, state text, priority integer, inputs jsonb, shape text, invocation integer);
    END IF;
    IF d ? 'requests' THEN
        INSERT INTO jayrun.placement_requests (execution_id, position, device, backend, is_group, min_devices, max_devices, prefer_max_devices, group_bytes, per_device_bytes, exclusive, device_id)
        SELECT x.* FROM jsonb_to_recordset(d -> 'requests') AS x (
            execution_id uuid, position integer, device text, backend text, is_group boolean, min_devices integer,
            max_devices integer, prefer_max_devices boolean, group_bytes bigint, per_device_bytes bigint,
            exclusive boolean, device_id integer);
    END IF;
    FOR r IN SELECT * FROM jsonb_to_recordset(d -> 'parked') AS x (id uuid, shape text, invocation integer) LOOP
        -- A detached one leaves its worker, and waits for any that its host, or every host, may have.
        UPDATE jayrun.executions SET state = 'waiting', shape = r.shape, invocation = r.invocation, bypassed = 0,
            waiting_since = clock_timestamp(),
            holder_id = CASE WHEN NOT detached THEN holder_id END,
            host_id = CASE WHEN detached THEN pinned_host_id ELSE host_id END
        WHERE id = r.id;
    END LOOP;
    FOR r IN SELECT * FROM jsonb_to_recordset(d -> 'admitted') AS x (id uuid, holder_id uuid) LOOP
        UPDATE jayrun.executions SET state = 'admitted', invocation = invocation + 1,
            admitted_at = moment, waiting_since = NULL, holder_id = r.holder_id, host_id = (d -> 'host_id')::bigint,
            waited_seconds = waited_seconds + extract(epoch FROM moment - waiting_since)
        WHERE unit_id = r.id AND state || '' = 'waiting';
    END LOOP;
    IF d ? 'leases' THEN
        RETURN QUERY
        INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id)
        SELECT x.id, x.execution_id, x.position, x.invocation, x.host_id
        FROM jsonb_to_recordset(d -> 'leases') AS x (
            id uuid, execution_id uuid, position integer, invocation integer, host_id bigint)
        RETURNING id, epoch;
        INSERT INTO jayrun.lease_shares (lease_id, device_id, memory_bytes, exclusive)
        SELECT x.* FROM jsonb_to_recordset(d -> 'shares') AS x (
            lease_id uuid, device_id bigint, memory_bytes bigint, exclusive boolean);
        INSERT INTO jayrun.lease_holders (lease_id, holder_id)
        SELECT x.id, x.holder_id FROM jsonb_to_recordset(d -> 'leases') AS x (id uuid, holder_id uuid);
    END IF;
    -- A waiter is written at most as often as it may be bypassed, however long it waits.
    FOR r IN SELECT * FROM jsonb_to_recordset(d -> 'bypasses') AS x (shape text, priority integer, age bigint) LOOP
        UPDATE jayrun.executions w SET bypassed = w.bypassed + 1
        WHERE w.shape = r.shape AND w.queue_id IN (0, (d -> 'host_id')::bigint)
          AND w.state = 'waiting' AND w.id = w.unit_id AND NOT w.dormant
          AND (w.priority > r.priority OR (w.priority = r.priority AND w.age < r.age))
          AND w.bypassed < (SELECT bypass_limit FROM jayrun.settings);
    END LOOP;
    -- A host that was forgotten has no devices until it is back: what waits for it waits on.
    IF d ? 'impossible'
       AND NOT EXISTS (SELECT FROM jayrun.hosts WHERE id = (d -> 'host_id')::bigint AND forgotten_at IS NOT NULL) THEN
        PERFORM jayrun.fail_waiting(x.id, jsonb_build_object('type', 'PlacementImpossible', 'message', x.message))
        FROM jsonb_to_recordset(d -> 'impossible') AS x (id uuid, message text);
    END IF;
END $f$;
COMMENT ON FUNCTION jayrun.write_pass IS 'Behind the gate: writes what one admission decided; returns the new leases';

CREATE FUNCTION jayrun.glance(the_host bigint, the_holder uuid, OUT seen text, OUT somebody_waits boolean)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off AS $f$
BEGIN
    seen := json_build_array(
        (SELECT json_agg(json_build_array(d.id, d.host_index, d.kind, d.backends, d.capacity_bytes,
                                          d.reserved_bytes - f.bytes, d.share_count - f.shares,
                                          d.exclusive_count > f.exclusives, d.exclusive_only,
                                          CASE WHEN d.fault IS NULL THEN d.state ELSE 'offline' END,
                                          d.withheld_bytes, d.parent_uuid IS NOT NULL, d.island, d.fault, d.device_uuid)
                         ORDER BY d.kind, d.host_index)
         FROM jayrun.devices d CROSS JOIN LATERAL (
             SELECT coalesce(sum(s.memory_bytes), 0)::bigint AS bytes, count(*) AS shares,
                    count(*) FILTER (WHERE s.exclusive) AS exclusives
             FROM jayrun.lease_shares s
             WHERE s.device_id = d.id AND s.ended_at IS NOT NULL AND s.folded_at IS NULL OFFSET 0) f
         WHERE d.host_id = the_host AND d.removed_at IS NULL),
        (SELECT o.visible FROM jayrun.holders o WHERE o.id = the_holder));
    somebody_waits := EXISTS (SELECT FROM jayrun.executions w
                              WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.queue_id IN (0, the_host));
END $f$;
COMMENT ON FUNCTION jayrun.glance IS
    'Before the gate: the devices of a host with all that has ended folded and what the holder''s mask shows of them, as text, and whether anybody waits there';

CREATE FUNCTION jayrun.grant_at_once(
    the_host bigint, the_holder uuid, the_unit uuid, the_execution uuid, the_position integer, the_invocation integer,
    is_new boolean, last_seen text, d jsonb, OUT lease_epoch bigint)
LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
DECLARE
    r record;
    seen text;
BEGIN
    UPDATE jayrun.lease_shares SET folded_at = clock_timestamp()
    WHERE ended_at IS NOT NULL AND folded_at IS NULL
      AND device_id IN (SELECT x.id FROM jayrun.devices x WHERE x.host_id = the_host);
    -- Whoever asks is alive and asks this for the first time, in an execution that goes on, and stands behind nobody.
    IF EXISTS (SELECT FROM jayrun.executions w
               WHERE w.state = 'waiting' AND w.id = w.unit_id AND w.queue_id IN (0, the_host))
       OR NOT EXISTS (SELECT FROM jayrun.holders o WHERE o.id = the_holder AND o.state || '' = 'alive' AND o.boot_id = (
                          SELECT h.boot_id FROM jayrun.hosts h WHERE h.id = the_host))
       OR is_new = EXISTS (SELECT FROM jayrun.executions e WHERE e.id = the_execution)
       OR EXISTS (SELECT FROM jayrun.executions e WHERE e.id IN (the_execution, the_unit)
                  AND (e.state || '' <> 'running' OR e.cancelled_at IS NOT NULL OR e.holder_id <> the_holder))
       OR EXISTS (SELECT FROM jayrun.leases l WHERE l.execution_id = the_execution AND l.position = the_position
                  AND l.invocation = the_invocation) THEN
        RETURN;
    END IF;
    IF last_seen IS NOT NULL THEN
        seen := json_build_array(
            (SELECT json_agg(json_build_array(x.id, x.host_index, x.kind, x.backends, x.capacity_bytes, x.reserved_bytes,
                                              x.share_count, x.exclusive_count > 0, x.exclusive_only,
                                              CASE WHEN x.fault IS NULL THEN x.state ELSE 'offline' END,
                                              x.withheld_bytes, x.parent_uuid IS NOT NULL, x.island, x.fault, x.device_uuid)
                             ORDER BY x.kind, x.host_index)
             FROM jayrun.devices x WHERE x.host_id = the_host AND x.removed_at IS NULL),
            (SELECT o.visible FROM jayrun.holders o WHERE o.id = the_holder));
        IF seen <> last_seen THEN
            RETURN;
        END IF;
    ELSE
        -- What was chosen is still called so, is of that make, and is seen by who asks.
        IF (SELECT coalesce(o.visible, 'null') FROM jayrun.holders o WHERE o.id = the_holder) <> d -> 'visible' THEN
            RETURN;
        END IF;
        FOR r IN SELECT * FROM jsonb_to_recordset(d -> 'shares') AS x (
            device_id bigint, host_index integer, memory_bytes bigint, exclusive boolean)
        LOOP
            IF NOT EXISTS (
                SELECT FROM jayrun.devices v
                WHERE v.id = r.device_id AND v.state || '' = 'online' AND v.fault IS NULL AND v.removed_at IS NULL
                  AND v.host_index = r.host_index AND d ->> 'backend' = ANY (v.backends)
                  AND (v.share_count = 0 AND v.withheld_bytes = 0 OR NOT r.exclusive)
                  AND v.exclusive_count = 0 AND v.exclusive_only <= r.exclusive
                  AND v.reserved_bytes + v.withheld_bytes + r.memory_bytes <= v.capacity_bytes) THEN
                RETURN;
            END IF;
        END LOOP;
    END IF;
    SELECT w.lease_epoch INTO lease_epoch FROM jayrun.write_pass(d) w;
END $f$;
COMMENT ON FUNCTION jayrun.grant_at_once IS
    'Behind the gate: grants what was decided before it, if nobody waits and the devices still are what was last seen; or, if that is not said, if the shares still fit';

CREATE FUNCTION jayrun.leave(
    the_holder uuid, lease_ids uuid[], lease_epochs bigint[], holds integer[], reason text) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
DECLARE
    r record;
BEGIN
    -- Whoever ends several of these rows locks them by lease, so that nobody waits in a circle.
    FOR r IN SELECT * FROM unnest(lease_ids, lease_epochs, holds) AS a (lease_id, epoch, hold) ORDER BY lease_id, hold LOOP
        IF EXISTS (SELECT FROM jayrun.leases WHERE id = r.lease_id AND epoch = r.epoch) THEN
            UPDATE jayrun.lease_holders SET ended_at = clock_timestamp(), end_reason = reason
            WHERE lease_id = r.lease_id AND holder_id = the_holder AND hold = r.hold AND end_reason IS NULL;
        END IF;
    END LOOP;
END $f$;
COMMENT ON FUNCTION jayrun.leave IS
    'A holder leaves leases, named by id and epoch; what ended already or is not its own is passed over';

CREATE FUNCTION jayrun.join_lease(
    the_holder uuid, the_lease uuid, the_epoch bigint, the_hold integer, OUT joined boolean, OUT lease_host bigint)
LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
BEGIN
    -- The lock waits for whoever ends it just now, and makes whoever comes to end it wait for the further holder.
    SELECT l.host_id INTO lease_host FROM jayrun.leases l
    WHERE l.id = the_lease AND l.epoch = the_epoch AND l.ended_at IS NULL FOR UPDATE;
    joined := lease_host = (SELECT host_id FROM jayrun.holders WHERE id = the_holder);
    IF joined THEN
        INSERT INTO jayrun.lease_holders (lease_id, holder_id, hold) VALUES (the_lease, the_holder, the_hold)
        ON CONFLICT DO NOTHING;
    END IF;
END $f$;
COMMENT ON FUNCTION jayrun.join_lease IS
    'A further holder joins a live lease of its host; lease_host is null when it has ended';

CREATE FUNCTION jayrun.finish(ends jsonb) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off AS $f$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT * FROM jsonb_to_recordset(ends) AS x (id uuid, state text, failure jsonb, attempt integer) LOOP
        UPDATE jayrun.executions SET state = r.state, ended_at = clock_timestamp(), failure = r.failure,
            attempt = r.attempt
        WHERE id = r.id AND state || '' = 'running';
    END LOOP;
END $f$;
COMMENT ON FUNCTION jayrun.finish IS 'Executions that their process ran have ended; what ended already is passed over';

CREATE FUNCTION jayrun.anybody_waits(the_host bigint) RETURNS boolean LANGUAGE plpgsql STABLE
SET enable_seqscan = off AS $f$
BEGIN
    RETURN EXISTS (SELECT FROM jayrun.executions
                   WHERE state = 'waiting' AND id = unit_id AND queue_id IN (0, the_host) AND NOT dormant);
END $f$;
COMMENT ON FUNCTION jayrun.anybody_waits IS
    'Whether a unit waits that the host may serve and whose process, if it has one, shows life';

CREATE FUNCTION jayrun.unit_of(the_head uuid) RETURNS json LANGUAGE plpgsql STABLE
SET enable_seqscan = off AS $f$
DECLARE
    admitted timestamptz := (SELECT admitted_at FROM jayrun.executions WHERE id = the_head);
BEGIN
    -- Without a wait that is the head alone, with what it recorded in earlier tries; a set-up that was done before and
    -- is still running is none of those that were admitted together.
    RETURN (
        SELECT json_agg(json_build_array(m.id, m.name, m.invocation, m.age, m.inputs,
            (SELECT json_agg(json_build_array(q.device, q.backend, q.is_group, q.min_devices, q.max_devices,
                    q.prefer_max_devices, q.group_bytes, q.per_device_bytes, q.exclusive, q.device_id)
                    ORDER BY q.position + 0)
             FROM jayrun.placement_requests q WHERE q.execution_id = m.id),
            (SELECT json_agg(json_build_array(l.id, l.epoch, l.execution_id, l.position, jayrun.shares_of(l.id))
                    ORDER BY l.position + 0)
             FROM jayrun.leases l
             WHERE l.execution_id = m.id AND l.invocation = m.invocation AND l.ended_at IS NULL))
            ORDER BY m.id = the_head, m.age)
        FROM jayrun.executions m
        WHERE m.unit_id = the_head AND m.state || '' = 'running' AND (m.id = the_head OR m.admitted_at = admitted));
END $f$;
COMMENT ON FUNCTION jayrun.unit_of IS
    'A running unit as whoever goes on with it needs it: its executions, set-ups first, with what each recorded and its leases';

CREATE FUNCTION jayrun.shares_of(the_lease uuid) RETURNS json LANGUAGE plpgsql STABLE
SET enable_seqscan = off AS $f$
BEGIN
    RETURN (
        SELECT json_agg(json_build_array(d.id, d.host_index, d.device_uuid, s.memory_bytes, s.exclusive)
                        ORDER BY d.host_index)
        FROM jayrun.lease_shares s CROSS JOIN LATERAL (
            SELECT * FROM jayrun.devices WHERE id = s.device_id OFFSET 0) d
        WHERE s.lease_id = the_lease);
END $f$;
COMMENT ON FUNCTION jayrun.shares_of IS 'What a lease has of each of its devices, by their number on the host';

CREATE FUNCTION jayrun.attend(waiting uuid[], OUT woken boolean, OUT ended json, OUT claimed json) LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $f$
DECLARE
    head uuid;
BEGIN
    UPDATE jayrun.executions SET dormant = false WHERE id = ANY (waiting) AND dormant;
    woken := FOUND;
    FOR head IN SELECT id FROM jayrun.executions WHERE id = ANY (waiting) AND state || '' = 'admitted' LOOP
        UPDATE jayrun.executions SET state = 'running', claim = claim + 1
        WHERE unit_id = head AND state || '' = 'admitted';
    END LOOP;
    -- What runs was claimed just now; or by the same process before, and the answer was lost. What was admitted between
    -- these statements is claimed when its notification comes.
    SELECT json_agg(json_build_array(e.id, e.state, e.failure)) FILTER (WHERE e.state <> 'running'),
           json_agg(json_build_array(e.id, jayrun.unit_of(e.id))) FILTER (WHERE e.state = 'running')
    INTO ended, claimed
    FROM jayrun.executions e WHERE e.id = ANY (waiting) AND e.state NOT IN ('waiting', 'admitted');
END $f$;
COMMENT ON FUNCTION jayrun.attend IS
    'The process of these waiting units shows life and asks for news: those admitted are claimed, and told with their leases';

CREATE FUNCTION jayrun.next_execution(the_worker uuid, done jsonb, before_waiting boolean,
    OUT is_alive boolean, OUT finished boolean, OUT waits boolean, OUT taken json) LANGUAGE plpgsql
-- Else what reads the worker's operators, an array, would be planned anew each time, which takes longer than all the rest.
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $f$
DECLARE
    told record;
    me jayrun.holders%ROWTYPE;
    mine uuid;
    first_waiting record;
    candidate record;
    next_ready jayrun.executions%ROWTYPE;
    somebody_watches boolean;
BEGIN
    waits := false;
    IF done IS NOT NULL THEN
        SELECT * INTO told FROM jsonb_to_record(done) AS x (
            id uuid, claim bigint, state text, result jsonb, result_kind text, failure jsonb, pause_seconds double precision);
        IF told.state = 'ready' THEN
            -- What was asked to end meanwhile is not tried again. The lock waits for whoever asks just now.
            PERFORM FROM jayrun.executions WHERE id = told.id FOR NO KEY UPDATE;
            IF EXISTS (SELECT FROM jayrun.executions WHERE id = told.id AND cancelled_at IS NOT NULL) THEN
                told.state := 'cancelled';
            END IF;
        END IF;
        UPDATE jayrun.executions e SET state = told.state, result = told.result, result_kind = told.result_kind,
            failure = CASE WHEN told.state <> 'succeeded' THEN
                coalesce(told.failure || jsonb_build_object('at', clock_timestamp()), e.failure) END,
            ended_at = CASE WHEN told.state <> 'ready' THEN clock_timestamp() END,
            attempt = e.attempt + (told.state = 'ready' AND told.failure IS NOT NULL)::integer,
            not_before = clock_timestamp() + make_interval(secs => told.pause_seconds),
            holder_id = CASE WHEN told.state <> 'ready' THEN e.holder_id END,
            host_id = CASE WHEN told.state <> 'ready' THEN e.host_id ELSE e.pinned_host_id END
        WHERE e.id = told.id AND e.claim = told.claim AND e.state || '' = 'running' AND e.holder_id = the_worker
        RETURNING e.watched INTO somebody_watches;
        -- Told once more, since the answer was lost: it stands there as this claim ended it, and nobody else did that.
        finished := FOUND OR EXISTS (
            SELECT FROM jayrun.executions e
            WHERE e.id = told.id AND e.claim = told.claim AND e.state = told.state);
        IF somebody_watches THEN
            PERFORM jayrun.tell(ARRAY[done ->> 'id']);
        END IF;
    END IF;
    -- Of another boot than its host, it runs on a machine whose place another has taken.
    SELECT * INTO me FROM jayrun.holders o WHERE o.id = the_worker AND o.state = 'alive'
        AND o.boot_id = (SELECT h.boot_id FROM jayrun.hosts h WHERE h.id = o.host_id);
    is_alive := FOUND;
    IF NOT is_alive OR me.operators = '{}' THEN
        RETURN;
    END IF;
    -- What it was given; or what it took, and the answer was lost.
    SELECT id INTO mine FROM jayrun.executions
    WHERE holder_id = the_worker AND detached AND id = unit_id AND state IN ('admitted', 'running');
    IF mine IS NULL THEN
        -- Some of each operator, for others may be taking the first ones just now. Each by its key, for the planner may
        -- know only of few ready ones: then it would go through all that there are, by the index of the ready ones.
        FOR candidate IN
            SELECT c.* FROM unnest(me.operators) o CROSS JOIN LATERAL (
                SELECT r.id, r.priority, r.age FROM jayrun.executions r
                WHERE r.state = 'ready' AND r.name = o AND r.queue_id IN (0, me.host_id)
                  AND (r.not_before IS NULL OR r.not_before <= clock_timestamp())
                ORDER BY r.priority DESC, r.age LIMIT 32) c
            ORDER BY c.priority DESC, c.age
        LOOP
            SELECT e.* INTO next_ready FROM jayrun.executions e
            WHERE e.id = candidate.id AND e.state || '' = 'ready' FOR UPDATE SKIP LOCKED;
            EXIT WHEN FOUND;
        END LOOP;
        IF NOT before_waiting THEN
            SELECT c.priority, c.age INTO first_waiting FROM unnest(me.operators) o CROSS JOIN LATERAL (
                SELECT w.priority, w.age FROM jayrun.executions w
                WHERE w.state = 'waiting' AND w.detached AND w.id = w.unit_id AND w.name = o
                  AND w.queue_id IN (0, me.host_id) AND NOT w.dormant
                ORDER BY w.priority DESC, w.age LIMIT 1) c
            ORDER BY c.priority DESC, c.age LIMIT 1;
            waits := first_waiting.age IS NOT NULL AND (next_ready.age IS NULL
                OR first_waiting.priority > next_ready.priority
                OR (first_waiting.priority = next_ready.priority AND first_waiting.age < next_ready.age));
            IF waits THEN
                RETURN;
            END IF;
        END IF;
        mine := next_ready.id;
    END IF;
    -- Whoever judges this worker dead waits from here on for the claim, and frees it; or was first, and nothing is claimed.
    IF mine IS NOT NULL THEN
        PERFORM FROM jayrun.holders WHERE id = the_worker AND state = 'alive' FOR KEY SHARE;
    END IF;
    IF mine IS NULL OR NOT FOUND THEN
        RETURN;
    END IF;
    UPDATE jayrun.executions e SET state = 'running', claim = e.claim + 1, claimed_at = clock_timestamp(),
        holder_id = the_worker, host_id = me.host_id, not_before = NULL,
        invocation = CASE WHEN e.state = 'ready' AND e.claim > 0 THEN e.invocation + 1 ELSE e.invocation END
    WHERE e.unit_id = mine AND e.state IN ('ready', 'admitted', 'running') AND (e.id = mine OR e.state = 'admitted');
    SELECT json_build_object(
        'id', e.id, 'name', e.name, 'inputs', e.inputs, 'claim', e.claim, 'attempt', e.attempt,
        'invocation', e.invocation, 'age', e.age, 'priority', e.priority, 'pinned_host_id', e.pinned_host_id,
        'max_attempts', e.max_attempts, 'retry_on', e.retry_on, 'retry_seconds', e.retry_seconds,
        'retry_backoff', e.retry_backoff,
        -- When it is new there is nothing else to read.
        'unit', CASE WHEN e.claim > 1 OR e.shape IS NOT NULL THEN jayrun.unit_of(e.id) END)
    INTO taken FROM jayrun.executions e WHERE e.id = mine;
END $f$;
COMMENT ON FUNCTION jayrun.next_execution IS
    'A worker tells how its execution ended and takes the next: the admitted one that it was given, else the first ready; waits: somebody who waits stands before that, so admit first';

CREATE FUNCTION jayrun.wake_workers(the_name text, the_host bigint) RETURNS void LANGUAGE plpgsql AS $f$
DECLARE
    idle uuid;
BEGIN
    -- One, who passes it on (jayrun.pass_on): waking all of them for each execution takes longer than running it. None
    -- when all are busy: who ends an execution looks again after its commit.
    SELECT o.id INTO idle FROM jayrun.holders o
    WHERE o.state = 'alive' AND o.role = 'worker' AND the_name = ANY (o.operators)
      AND (the_host IS NULL OR o.host_id = the_host)
      AND NOT EXISTS (SELECT FROM jayrun.executions t WHERE t.holder_id = o.id AND t.detached
                      AND t.id = t.unit_id AND t.state IN ('admitted', 'running'))
    ORDER BY o.silent, random() LIMIT 1;
    IF FOUND THEN
        PERFORM jayrun.tell(ARRAY[idle::text]);
    END IF;
END $f$;
COMMENT ON FUNCTION jayrun.wake_workers IS
    'Tells an idle worker that an execution of that name is ready, on that host (null: on any)';

CREATE FUNCTION jayrun.pass_on(the_worker uuid) RETURNS void LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan AS $f$
BEGIN
    PERFORM jayrun.wake_workers(c.name, c.pinned_host_id)
    FROM jayrun.holders me CROSS JOIN LATERAL unnest(me.operators) o CROSS JOIN LATERAL (
        SELECT r.name, r.pinned_host_id FROM jayrun.executions r
        WHERE r.state = 'ready' AND r.name = o AND r.queue_id IN (0, me.host_id)
          AND (r.not_before IS NULL OR r.not_before <= clock_timestamp())
        ORDER BY r.priority DESC, r.age LIMIT 1) c
    WHERE me.id = the_worker;
END $f$;
COMMENT ON FUNCTION jayrun.pass_on IS
    'A worker that was woken, after the commit by which it took its execution: whether more is ready, for others';
"""

VIEWS = """
CREATE FUNCTION jayrun_audit.why_withheld(the_device bigint) RETURNS text LANGUAGE sql STABLE AS $f$
    SELECT nullif(concat_ws('; ',
        CASE WHEN b.respect_observed AND o.foreign_bytes IS DISTINCT FROM 0 THEN
            coalesce(trim_scale(round(o.foreign_bytes / 1e9, 3)) || ' GB', 'an unknown amount')
            || ' used without a lease by '
            || coalesce((SELECT string_agg('pid ' || p.pid || ' (' || p.user_name || ')', ', ' ORDER BY p.pid)
                         FROM jayrun.process_observations p
                         WHERE p.device_id = d.id AND p.finding IN ('orphan', 'squatter')), 'others') END,
        (SELECT string_agg(trim_scale(round(q.memory_bytes / 1e9, 3)) || ' GB in quarantine since lease '
                           || right(replace(q.lease_id::text, '-', ''), 12) || ' was reclaimed, for '
                           || ceil(extract(epoch FROM q.until - clock_timestamp())) || ' s more at most', '; ' ORDER BY q.since)
         FROM jayrun.quarantines q
         WHERE q.device_id = d.id AND q.ended_at IS NULL AND q.until > clock_timestamp())), '')
    FROM jayrun.settings b, jayrun.devices d
    LEFT JOIN jayrun.device_observations x ON x.device_id = d.id
    CROSS JOIN LATERAL (SELECT CASE WHEN x.device_id IS NULL THEN 0 ELSE x.foreign_bytes END AS foreign_bytes) o
    WHERE d.id = the_device AND greatest(d.withheld_bytes, jayrun.quarantined_bytes(d.id)) > 0
$f$;
COMMENT ON FUNCTION jayrun_audit.why_withheld IS 'Why something of a device is withheld now; null: nothing is';

CREATE VIEW jayrun_audit.capacity AS
SELECT h.name AS host, d.host_index AS device_id, d.kind AS device, d.backends, d.device_uuid, d.name, w.state,
       d.exclusive_only, d.capacity_bytes, s.reserved_bytes,
       CASE WHEN s.exclusively_leased OR w.state <> 'online' THEN 0
            ELSE greatest(d.capacity_bytes - s.reserved_bytes - s.withheld_bytes, 0) END AS free_bytes,
       s.leases, s.exclusively_leased, d.host_id, d.id AS device_key,
       s.withheld_bytes, jayrun_audit.why_withheld(d.id) AS withheld_for, d.ignore_bytes, d.ignore_commands,
       d.fault, d.parent_uuid, d.declared, d.total_bytes, d.reserve_bytes, d.pci_bus_id, d.island
FROM jayrun.devices d JOIN jayrun.hosts h ON h.id = d.host_id
CROSS JOIN LATERAL (
    SELECT CASE WHEN d.fault IS NOT NULL
                     OR h.seen_at < clock_timestamp() - make_interval(secs => b.holder_ttl_seconds) THEN 'offline'
                ELSE d.state END AS state
    FROM jayrun.settings b) w
CROSS JOIN LATERAL (
    SELECT coalesce(sum(memory_bytes), 0)::bigint AS reserved_bytes, count(*)::integer AS leases,
           coalesce(bool_or(exclusive), false) AS exclusively_leased,
           -- A share that has ended is withheld from now on, and not only once it is folded.
           greatest(d.withheld_bytes, jayrun.quarantined_bytes(d.id)) AS withheld_bytes
    FROM jayrun.lease_shares WHERE device_id = d.id AND folded_at IS NULL AND ended_at IS NULL) s
WHERE d.removed_at IS NULL;
COMMENT ON VIEW jayrun_audit.capacity IS
    'Every declared device: its capacity, what its live leases reserve, and what could be granted now; offline while its host is silent or the hardware is at fault';

CREATE VIEW jayrun_audit.hosts AS
SELECT h.name AS host, h.identity,
       CASE WHEN h.forgotten_at IS NOT NULL THEN 'forgotten'
            WHEN h.seen_at < clock_timestamp() - make_interval(secs => b.holder_ttl_seconds) THEN 'silent' ELSE 'online' END AS state,
       h.seen_at, clock_timestamp() - h.seen_at AS age,
       (SELECT count(*) FROM jayrun.devices d WHERE d.host_id = h.id AND d.removed_at IS NULL)::integer AS devices,
       (SELECT count(DISTINCT s.lease_id) FROM jayrun.devices d JOIN jayrun.lease_shares s ON s.device_id = d.id
        WHERE d.host_id = h.id AND s.folded_at IS NULL AND s.ended_at IS NULL)::integer AS leases,
       (SELECT count(*) FROM jayrun.holders o WHERE o.host_id = h.id AND o.state = 'alive')::integer AS holders,
       h.boot_id, h.registered_at, h.forgotten_at, h.id AS host_id
FROM jayrun.hosts h CROSS JOIN jayrun.settings b;
COMMENT ON VIEW jayrun_audit.hosts IS
    'Every host: whether somebody of it is in touch with the book (age: since when not), and what is declared and held there';

CREATE VIEW jayrun_audit.holders AS
SELECT o.id, h.name AS host, o.pid, o.user_name AS "user", o.database_user, o.label, o.command, o.role,
       CASE WHEN o.seen_at < clock_timestamp() - make_interval(secs => b.holder_ttl_seconds) THEN 'silent'
            ELSE 'alive' END AS state,
       o.registered_at AS since, o.seen_at, clock_timestamp() - o.seen_at AS age, x.leases, x.memory_bytes, o.pid_namespace,
       o.boot_id, o.host_id
FROM jayrun.holders o JOIN jayrun.hosts h ON h.id = o.host_id CROSS JOIN jayrun.settings b
CROSS JOIN LATERAL (
    SELECT count(DISTINCT x.lease_id)::integer AS leases, coalesce(sum(s.memory_bytes), 0)::bigint AS memory_bytes
    FROM (SELECT DISTINCT lease_id FROM jayrun.lease_holders WHERE holder_id = o.id AND ended_at IS NULL) x
    JOIN jayrun.lease_shares s ON s.lease_id = x.lease_id) x
WHERE o.state = 'alive';
COMMENT ON VIEW jayrun_audit.holders IS
    'Every process that the book has as alive: what it is, when somebody last saw it (silent: not of late), and what it holds';

CREATE VIEW jayrun_audit.leases AS
SELECT l.id, l.epoch, h.name AS host, s.device_ids, s.memory_bytes, s.exclusive, e.name AS execution, e.kind,
       e.id AS execution_id, p.pid, p.user_name AS "user", p.label, p.command, l.granted_at, p.seen_at,
       clock_timestamp() - l.granted_at AS age, p.holders, l.host_id
FROM jayrun.leases l
JOIN jayrun.hosts h ON h.id = l.host_id
JOIN jayrun.executions e ON e.id = l.execution_id
CROSS JOIN LATERAL (
    SELECT array_agg(d.host_index ORDER BY d.host_index) AS device_ids, sum(s.memory_bytes)::bigint AS memory_bytes,
           bool_or(s.exclusive) AS exclusive
    FROM jayrun.lease_shares s JOIN jayrun.devices d ON d.id = s.device_id WHERE s.lease_id = l.id) s
LEFT JOIN LATERAL (
    SELECT (array_agg(o.pid ORDER BY x.since))[1] AS pid, (array_agg(o.user_name ORDER BY x.since))[1] AS user_name,
           (array_agg(o.label ORDER BY x.since))[1] AS label, (array_agg(o.command ORDER BY x.since))[1] AS command,
           max(o.seen_at) AS seen_at, count(DISTINCT o.id)::integer AS holders
    FROM jayrun.lease_holders x JOIN jayrun.holders o ON o.id = x.holder_id
    WHERE x.lease_id = l.id AND x.ended_at IS NULL) p ON true
WHERE l.id IN (SELECT lease_id FROM jayrun.lease_shares WHERE folded_at IS NULL AND ended_at IS NULL);
COMMENT ON VIEW jayrun_audit.leases IS
    'Every live lease: devices, bytes, the first of its holders (pid, user, label), and since when';

CREATE VIEW jayrun_audit.queue AS
SELECT row_number() OVER (PARTITION BY w.queue_id ORDER BY w.priority DESC, w.age) AS position,
       w.id AS execution_id, w.name AS execution, w.kind, h.name AS host, w.priority, r.asks,
       CASE WHEN w.dormant THEN 'its process does not answer'
            WHEN w.detached AND NOT EXISTS (
                SELECT FROM jayrun.holders k WHERE k.state = 'alive' AND w.name = ANY (k.operators)
                AND (w.host_id IS NULL OR k.host_id = w.host_id)) THEN 'no running worker knows operator ' || w.name
            ELSE coalesce(f.devices, CASE WHEN o.visible IS NULL THEN 'no such device is declared'
                                     ELSE 'no such device is visible to its process' END) END AS reason,
       w.bypassed, w.dormant, o.pid, coalesce(o.user_name, w.user_name) AS "user", coalesce(o.label, w.label) AS label,
       w.waiting_since,
       clock_timestamp() - w.waiting_since AS waiting, w.host_id
FROM jayrun.executions w
LEFT JOIN jayrun.hosts h ON h.id = w.host_id
LEFT JOIN jayrun.holders o ON o.id = w.holder_id
CROSS JOIN LATERAL (
    SELECT string_agg(
               CASE WHEN q.is_group THEN
                   q.min_devices || CASE WHEN q.max_devices > q.min_devices THEN '-' || q.max_devices ELSE '' END
                   || ' x ' || q.backend ELSE q.backend END
               || CASE WHEN q.device_id IS NOT NULL THEN ':' || q.device_id ELSE '' END
               || CASE WHEN q.per_device_bytes > 0 THEN
                   ' ' || trim_scale(q.per_device_bytes * 1e-9) || ' GB'
                   || CASE WHEN q.is_group THEN ' each' ELSE '' END ELSE '' END
               || CASE WHEN q.group_bytes > 0 THEN
                   ' ' || trim_scale(q.group_bytes * 1e-9) || ' GB in all' ELSE '' END
               || CASE WHEN q.exclusive THEN ' exclusive' ELSE '' END, ' + ' ORDER BY m.age, q.position) AS asks,
           array_agg(DISTINCT q.device || '/' || q.backend || ':' || coalesce(q.device_id::text, '*')) AS wanted
    FROM jayrun.executions m JOIN jayrun.placement_requests q ON q.execution_id = m.id
    WHERE m.unit_id = w.id AND m.state = 'waiting') r
LEFT JOIN LATERAL (
    SELECT string_agg(CASE WHEN w.host_id IS NULL THEN d.host || ' ' ELSE '' END || d.device || ' ' || d.device_id || ': '
               || CASE WHEN d.state <> 'online' THEN d.state || coalesce(': ' || d.fault, '')
                       WHEN d.exclusively_leased THEN 'exclusively leased'
                       ELSE trim_scale(round(d.free_bytes / 1e9, 3)) || ' of '
                            || trim_scale(round(d.capacity_bytes / 1e9, 3)) || ' GB free, '
                            || CASE WHEN d.withheld_bytes > 0 THEN
                                   trim_scale(round(d.withheld_bytes / 1e9, 3)) || ' GB withheld, ' ELSE '' END
                            || d.leases || CASE WHEN d.leases = 1 THEN ' lease' ELSE ' leases' END END,
               '; ' ORDER BY d.host, d.device, d.device_id) AS devices
    FROM jayrun_audit.capacity d
    WHERE (w.host_id IS NULL OR d.host_id = w.host_id)
      AND EXISTS (SELECT FROM unnest(d.backends) b, unnest(ARRAY['*', d.device_id::text]) number
                  WHERE d.device || '/' || b || ':' || number = ANY (r.wanted)
                    -- What the mask of its process hides cannot serve it; a mask knows a MIG slice by its UUID only.
                    AND (o.visible -> b IS NULL OR o.visible -> b ? d.device_uuid
                         OR (d.parent_uuid IS NULL AND o.visible -> b ? d.device_id::text)))) f ON true
WHERE w.state = 'waiting' AND w.id = w.unit_id;
COMMENT ON VIEW jayrun_audit.queue IS
    'Who waits, in the order of admission per host (no host: for any of them), for what, and the state of the devices that could serve it';

CREATE VIEW jayrun_audit.executions AS
SELECT e.id, e.name AS execution, e.kind, e.detached, e.state, e.cancelled_at IS NOT NULL AS cancelling, h.name AS host,
       e.priority, e.key, e.attempt, e.max_attempts, e.crashes, e.claim, e.inputs, e.result, e.result_kind, e.failure,
       o.pid, coalesce(o.user_name, e.user_name) AS "user", coalesce(nullif(e.label, ''), o.label, '') AS label,
       e.submitted_at, e.claimed_at, e.waiting_since, e.not_before, e.ended_at, e.waited_seconds,
       clock_timestamp() - e.submitted_at AS age, e.unit_id, e.host_id
FROM jayrun.executions e
LEFT JOIN jayrun.hosts h ON h.id = e.host_id
LEFT JOIN jayrun.holders o ON o.id = e.holder_id;
COMMENT ON VIEW jayrun_audit.executions IS
    'Every execution: what it is, where it stands, who runs or ran it, and how it ended';

CREATE VIEW jayrun_audit.audit AS
SELECT h.name AS host, d.kind AS device, d.host_index AS device_id, x.finding, x.used_bytes, x.leased_bytes, x.pid,
       x.user_name AS "user", x.command, x.lease_id, x.detail, x.since, clock_timestamp() - x.since AS lasts,
       o.observed_at, clock_timestamp() - o.observed_at AS age,
       coalesce(o.observed_at < clock_timestamp() - make_interval(secs => 3 * b.look_seconds), true) AS stale,
       d.host_id, d.id AS device_key
FROM jayrun.settings b, jayrun.devices d
JOIN jayrun.hosts h ON h.id = d.host_id
LEFT JOIN jayrun.device_observations o ON o.device_id = d.id
CROSS JOIN LATERAL (
    SELECT y.finding, y.used_bytes, y.leased_bytes, p.pid, p.user_name, p.command, y.lease_id, y.detail,
           coalesce(CASE WHEN y.finding = 'idle-lease' THEN y.unused_since END, l.granted_at) AS since
    FROM jayrun.lease_observations y
    JOIN jayrun.leases l ON l.id = y.lease_id AND l.ended_at IS NULL
    LEFT JOIN LATERAL (
        SELECT o.pid, o.user_name, o.command FROM jayrun.lease_holders t JOIN jayrun.holders o ON o.id = t.holder_id
        WHERE t.lease_id = l.id AND t.ended_at IS NULL ORDER BY t.since LIMIT 1) p ON true
    WHERE y.device_id = d.id
    UNION ALL
    SELECT z.finding, z.used_bytes, NULL, z.pid, z.user_name, z.command, z.lease_id, z.detail, z.first_seen
    FROM jayrun.process_observations z WHERE z.device_id = d.id AND z.finding IS NOT NULL
    UNION ALL
    SELECT coalesce(o.finding, 'unreadable'), o.used_bytes, NULL, NULL, NULL, NULL, NULL,
           coalesce(o.detail, 'nobody has looked at it yet'), NULL
    WHERE coalesce(o.finding, 'unreadable') = 'unreadable'
      AND NOT EXISTS (SELECT FROM jayrun.lease_observations y JOIN jayrun.leases l ON l.id = y.lease_id
                      WHERE y.device_id = d.id AND l.ended_at IS NULL AND y.detail = o.detail)
       OR NOT EXISTS (SELECT FROM jayrun.lease_observations y JOIN jayrun.leases l ON l.id = y.lease_id
                      WHERE y.device_id = d.id AND l.ended_at IS NULL)
      AND NOT EXISTS (SELECT FROM jayrun.process_observations z WHERE z.device_id = d.id AND z.finding IS NOT NULL)) x
WHERE d.removed_at IS NULL;
COMMENT ON VIEW jayrun_audit.audit IS
    'The book against the hardware, as it was last looked at (age: how long ago): each lease on each device, each process that uses one without a lease, and what could not be read';

CREATE VIEW jayrun_audit.violations AS
SELECT 'device counters differ from its shares' AS rule, d.id::text AS subject,
       format('reserved %s shares %s exclusive %s, but the shares say %s, %s, %s', d.reserved_bytes, d.share_count,
              d.exclusive_count, s.reserved, s.shares, s.exclusives) AS detail
FROM jayrun.devices d
CROSS JOIN LATERAL (
    SELECT coalesce(sum(memory_bytes), 0) AS reserved, count(*) AS shares, count(*) FILTER (WHERE exclusive) AS exclusives
    FROM jayrun.lease_shares WHERE device_id = d.id AND folded_at IS NULL) s
WHERE (d.reserved_bytes, d.share_count, d.exclusive_count) <> (s.reserved, s.shares, s.exclusives)
UNION ALL
SELECT 'exclusive share beside another', s.device_id::text, format('%s shares', count(*))
FROM jayrun.lease_shares s WHERE s.ended_at IS NULL
GROUP BY s.device_id HAVING bool_or(s.exclusive) AND count(*) > 1
UNION ALL
SELECT 'live share of an ended lease', s.lease_id::text, format('device %s', s.device_id)
FROM jayrun.lease_shares s JOIN jayrun.leases l ON l.id = s.lease_id
WHERE s.folded_at IS NULL AND s.ended_at IS NULL AND l.ended_at IS NOT NULL
UNION ALL
SELECT 'live lease that nobody holds', l.id::text, format('execution %s', l.execution_id)
FROM jayrun.lease_shares s JOIN jayrun.leases l ON l.id = s.lease_id
WHERE s.folded_at IS NULL AND l.ended_at IS NULL AND NOT EXISTS (
    SELECT FROM jayrun.lease_holders x WHERE x.lease_id = l.id AND x.ended_at IS NULL)
UNION ALL
SELECT 'lease held by a holder that has ended', x.lease_id::text, format('holder %s', x.holder_id)
FROM jayrun.lease_holders x JOIN jayrun.holders o ON o.id = x.holder_id
WHERE x.ended_at IS NULL AND o.state = 'ended'
UNION ALL
SELECT 'lease on devices of another host', s.lease_id::text, format('device %s', s.device_id)
FROM jayrun.lease_shares s JOIN jayrun.leases l ON l.id = s.lease_id JOIN jayrun.devices d ON d.id = s.device_id
WHERE s.folded_at IS NULL AND d.host_id <> l.host_id
UNION ALL
SELECT 'group lease with a wrong number of devices', l.id::text, format('%s devices', count(*))
FROM jayrun.lease_shares s JOIN jayrun.leases l ON l.id = s.lease_id
JOIN jayrun.placement_requests q ON q.execution_id = l.execution_id AND q.position = l.position
WHERE l.id IN (SELECT lease_id FROM jayrun.lease_shares WHERE folded_at IS NULL)
GROUP BY l.id, q.min_devices, q.max_devices HAVING count(*) NOT BETWEEN q.min_devices AND q.max_devices;
COMMENT ON VIEW jayrun_audit.violations IS 'Rules that the book promises and that are broken now; always empty';
"""


def upgrade() -> None:
    connection = op.get_bind().execution_options(
        no_parameters=True
    )  # so that % stays % and scripts may be many statements
    for script in (TABLES, TRIGGERS, FUNCTIONS, VIEWS):
        connection.exec_driver_sql(script)


def downgrade() -> None:
    op.execute(
        """
        DROP SCHEMA jayrun_audit CASCADE;
        DO $$ DECLARE t text; BEGIN
            FOR t IN SELECT format('DROP TABLE jayrun.%I CASCADE', tablename) FROM pg_tables
                     WHERE schemaname = 'jayrun' AND tablename <> 'schema_revision' LOOP EXECUTE t; END LOOP;
            FOR t IN SELECT format('DROP FUNCTION %s CASCADE', oid::regprocedure) FROM pg_proc
                     WHERE pronamespace = 'jayrun'::regnamespace LOOP EXECUTE t; END LOOP;
            FOR t IN SELECT format('DROP SEQUENCE jayrun.%I CASCADE', sequencename) FROM pg_sequences
                     WHERE schemaname = 'jayrun' LOOP EXECUTE t; END LOOP;
        END $$;
        """
    )
