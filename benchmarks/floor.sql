-- The least that an admission can cost on this server: the same rows written by one server-side call, without asking
-- anybody. Constraints and triggers of the book fire as they do for jayrun.
DROP SCHEMA IF EXISTS bench_floor CASCADE;
CREATE SCHEMA bench_floor;

CREATE FUNCTION bench_floor.holder(client integer) RETURNS uuid IMMUTABLE LANGUAGE sql
RETURN lpad(client::text, 32, '0')::uuid;

INSERT INTO jayrun.holders (id, host_id, boot_id, pid_namespace, pid, start_ticks, user_name, role)
SELECT bench_floor.holder(n), (SELECT min(id) FROM jayrun.hosts), 'benchmark', 1, 1, n, 'benchmark', 'runtime'
FROM generate_series(0, 1023) n ON CONFLICT DO NOTHING;

CREATE FUNCTION bench_floor.reserve(client integer, bytes bigint, OUT lease uuid, OUT epoch bigint) LANGUAGE plpgsql AS $f$
DECLARE
    host bigint;
    device bigint;
    execution uuid := gen_random_uuid();
    holder uuid := bench_floor.holder(client);
BEGIN
    SELECT host_id INTO host FROM jayrun.holders WHERE id = holder;
    UPDATE jayrun.lease_shares SET folded_at = clock_timestamp()
    WHERE ended_at IS NOT NULL AND folded_at IS NULL
      AND device_id IN (SELECT id FROM jayrun.devices WHERE host_id = host);
    SELECT id INTO STRICT device FROM jayrun.devices
    WHERE host_id = host AND removed_at IS NULL AND state = 'online' AND kind = 'gpu' AND 'cuda' = ANY (backends)
      AND NOT exclusive_only AND exclusive_count = 0 AND capacity_bytes - reserved_bytes >= bytes
    ORDER BY capacity_bytes - reserved_bytes, host_index LIMIT 1;
    INSERT INTO jayrun.executions (id, kind, name, unit_id, host_id, holder_id, state)
    VALUES (execution, 'operator', 'benchmark', execution, host, holder, 'running');
    INSERT INTO jayrun.placement_requests
    VALUES (execution, 0, 'gpu', 'cuda', false, 1, 1, false, 0, bytes, false, NULL);
    INSERT INTO jayrun.leases (id, execution_id, position, invocation, host_id)
    VALUES (gen_random_uuid(), execution, 0, 1, host) RETURNING leases.id, leases.epoch INTO lease, epoch;
    INSERT INTO jayrun.lease_shares (lease_id, device_id, memory_bytes, exclusive) VALUES (lease, device, bytes, false);
    INSERT INTO jayrun.lease_holders (lease_id, holder_id) VALUES (lease, holder);
END $f$;

CREATE FUNCTION bench_floor.release(client integer, of_lease uuid, of_epoch bigint) RETURNS void LANGUAGE plpgsql AS $f$
BEGIN
    UPDATE jayrun.lease_holders h SET ended_at = clock_timestamp(), end_reason = 'released'
    FROM jayrun.leases l
    WHERE l.id = of_lease AND l.epoch = of_epoch AND h.lease_id = l.id AND h.holder_id = bench_floor.holder(client)
      AND h.ended_at IS NULL;
END $f$;
