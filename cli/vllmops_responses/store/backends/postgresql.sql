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

-- The items are as they were when the statement began. Who held the conversation then may have
-- changed them since: each row tells, last, whether nobody has. What is empty gives one without an id.
-- name: hold
WITH held AS (
    UPDATE {name}_conversations SET holder = $3,
        held_until = date_part('epoch', statement_timestamp()) + $4
    WHERE id = $1 AND $2 IN ('*', owner) AND (
        holder IS NULL OR holder = $3 OR held_until < date_part('epoch', statement_timestamp())
    ) RETURNING next, size
)
SELECT items.id, items.body, items.answer, kept.next = held.next AND kept.size = held.size
FROM held JOIN {name}_conversations AS kept ON kept.id = $1
LEFT JOIN {name}_items AS items ON items.conversation_id = kept.id ORDER BY items.position

-- Items are added by `add`, what stores their response, and `added`. All of it is done or nothing: an
-- id that is taken is an error, and so is a division by none that was stored.
-- name: add
WITH changed AS (
    UPDATE {name}_conversations SET holder = NULL, size = size + $4, next = next + $4
    WHERE id = $1 AND $2 IN ('*', owner) AND (
        holder = $3 OR ($3 = '' AND size + CAST($4 AS BIGINT) <= $8 AND (
            holder IS NULL OR held_until < date_part('epoch', statement_timestamp())
        ))
    ) RETURNING next - $4 AS place
), items AS (
    INSERT INTO {name}_items (conversation_id, position, id, answer, body)
    SELECT $1, place + number - 1, given.id, answer, body FROM changed, unnest(
        CAST($5 AS TEXT[]), CAST($6 AS BOOLEAN[]), CAST($7 AS BYTEA[])
    ) WITH ORDINALITY AS given (id, answer, body, number)
), stored AS (

-- name: and create
    INSERT INTO {name}_responses (
        id, owner, model, status, created_at, previous_id, error, body, input, accessed_at, lease
    )
    SELECT $9, $10, $11, $12, CAST($13 AS FLOAT), $14, $15, CAST($16 AS BYTEA), CAST($17 AS BYTEA),
        CAST($18 AS FLOAT), date_part('epoch', statement_timestamp()) + $19
    FROM changed RETURNING 1

-- name: and put
    UPDATE {name}_responses SET status = $12, error = $13, body = $14, accessed_at = $15,
        lease = date_part('epoch', statement_timestamp()) + $16
    FROM changed WHERE id = $9 AND owner = $10 AND created_at = $11
        AND ($18 NOT LIKE '% ' || status || ' %' OR (status = 'failed' AND error = $17))
    RETURNING 1

-- name: and nothing
    SELECT 1

-- name: added
) SELECT 1 / (SELECT count(*) FROM stored) FROM changed

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
