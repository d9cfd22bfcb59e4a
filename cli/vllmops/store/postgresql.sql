-- What only PostgreSQL takes; see statements.sql.

-- name: schema 1
CREATE TABLE {name}_responses (
    id TEXT COLLATE "C" PRIMARY KEY,
    owner TEXT COLLATE "C" NOT NULL,
    model TEXT COLLATE "C" NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    accessed_at DOUBLE PRECISION NOT NULL,
    lease DOUBLE PRECISION,
    previous_id TEXT COLLATE "C",
    error TEXT NOT NULL,
    body BYTEA NOT NULL,
    input BYTEA NOT NULL
);
CREATE TABLE {name}_events (
    response_id TEXT COLLATE "C" NOT NULL REFERENCES {name}_responses ON DELETE CASCADE,
    first BIGINT NOT NULL,
    last BIGINT NOT NULL,
    written_at DOUBLE PRECISION NOT NULL,
    events BYTEA NOT NULL,
    PRIMARY KEY (response_id, first)
);
-- They are packed already.
ALTER TABLE {name}_responses ALTER body SET STORAGE EXTERNAL, ALTER input SET STORAGE EXTERNAL;
INSERT INTO {name}_meta (key, value) VALUES ('schema', 1)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value

-- name: schema 4
CREATE TABLE {name}_conversations (
    id TEXT COLLATE "C" PRIMARY KEY,
    owner TEXT COLLATE "C" NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    accessed_at DOUBLE PRECISION NOT NULL,
    metadata BYTEA NOT NULL,
    next BIGINT NOT NULL,
    size BIGINT NOT NULL,
    holder TEXT,
    held_until DOUBLE PRECISION
);
CREATE TABLE {name}_items (
    conversation_id TEXT COLLATE "C" NOT NULL REFERENCES {name}_conversations ON DELETE CASCADE,
    position BIGINT NOT NULL,
    id TEXT COLLATE "C" NOT NULL,
    answer BOOLEAN NOT NULL,
    body BYTEA NOT NULL,
    PRIMARY KEY (conversation_id, position),
    UNIQUE (conversation_id, id)
);
CREATE INDEX {name}_conversations_by_owner ON {name}_conversations (owner, created_at);
CREATE INDEX {name}_conversations_by_use ON {name}_conversations (accessed_at);
ALTER TABLE {name}_items ALTER body SET STORAGE EXTERNAL;
INSERT INTO {name}_meta (key, value) VALUES ('schema', 4)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value

-- name: add entries
INSERT INTO {name}_items (conversation_id, position, id, answer, body)
SELECT * FROM unnest(
    CAST($1 AS TEXT[]), CAST($2 AS BIGINT[]), CAST($3 AS TEXT[]), CAST($4 AS BOOLEAN[]),
    CAST($5 AS BYTEA[])
) ON CONFLICT DO NOTHING RETURNING 1

-- Several processes start at once, and one of them makes the tables.
-- name: alone
SELECT pg_advisory_xact_lock(hashtext('{name}'))

-- The rows as columns: one commit, and one answer, for all of them.
-- name: create
INSERT INTO {name}_responses (
    id, owner, model, status, created_at, previous_id, error, body, input, accessed_at, lease
)
SELECT id, owner, model, status, created_at, previous_id, error, body, input, used,
    date_part('epoch', statement_timestamp()) + lease
FROM unnest(
    CAST($1 AS TEXT[]), CAST($2 AS TEXT[]), CAST($3 AS TEXT[]), CAST($4 AS TEXT[]),
    CAST($5 AS FLOAT[]), CAST($6 AS TEXT[]), CAST($7 AS TEXT[]), CAST($8 AS BYTEA[]),
    CAST($9 AS BYTEA[]), CAST($10 AS FLOAT[]), CAST($11 AS FLOAT[])
) AS given (id, owner, model, status, created_at, previous_id, error, body, input, used, lease)
ON CONFLICT (id) DO NOTHING RETURNING id

-- name: get many
SELECT id, owner, model, status, created_at, previous_id, error, body, input,
    lease < date_part('epoch', statement_timestamp())
FROM {name}_responses WHERE id = ANY($1)

-- name: running
SELECT id FROM {name}_responses
WHERE id = ANY($1) AND (lease IS NOT NULL OR (status = 'failed' AND error = $2))

-- Nothing and some seconds are nothing.
-- name: renew
UPDATE {name}_responses SET lease = lease - lease + date_part('epoch', statement_timestamp()) + $3
WHERE id = ANY($1) AND (lease IS NOT NULL OR (status = 'failed' AND error = $2)) RETURNING id

-- A server that was away for long fails nothing when it comes back.
-- name: fail
UPDATE {name}_responses SET status = 'failed', error = $1, lease = NULL
WHERE lease IS NOT NULL AND lease < date_part('epoch', statement_timestamp())
    AND date_part('epoch', statement_timestamp() - pg_postmaster_start_time()) > $2 RETURNING 1

-- name: expire
WITH gone AS (
    SELECT id FROM {name}_responses WHERE (lease IS NOT NULL) = FALSE AND accessed_at < $1
    LIMIT $2 FOR UPDATE SKIP LOCKED
) DELETE FROM {name}_responses WHERE id IN (SELECT id FROM gone) RETURNING 1

-- What runs sorts behind what does not.
-- name: evict
WITH gone AS (
    SELECT id FROM {name}_responses WHERE owner = $1 AND id <> $3
    ORDER BY (lease IS NOT NULL), accessed_at
    LIMIT greatest(0, (SELECT count(*) FROM {name}_responses WHERE owner = $1) - $2)
    FOR UPDATE SKIP LOCKED
) DELETE FROM {name}_responses WHERE id IN (SELECT id FROM gone) RETURNING 1

-- name: caveats
SELECT name, setting FROM pg_settings
WHERE name IN ('fsync', 'synchronous_commit') AND setting = 'off' ORDER BY name

-- name: standbys
SELECT current_setting('synchronous_standby_names')
