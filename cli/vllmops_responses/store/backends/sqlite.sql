-- What only SQLite takes; see statements.sql.

-- name: schema 1
CREATE TABLE {name}_responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    model TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at REAL NOT NULL,
    accessed_at REAL NOT NULL,
    lease REAL,
    previous_id TEXT,
    error TEXT NOT NULL,
    body BLOB NOT NULL,
    input BLOB NOT NULL
);
CREATE TABLE {name}_events (
    response_id TEXT NOT NULL REFERENCES {name}_responses ON DELETE CASCADE,
    first BIGINT NOT NULL,
    last BIGINT NOT NULL,
    written_at REAL NOT NULL,
    events BLOB NOT NULL,
    PRIMARY KEY (response_id, first)
);
INSERT INTO {name}_meta (key, value) VALUES ('schema', 1)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value

-- name: schema 4
CREATE TABLE {name}_conversations (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created_at REAL NOT NULL,
    accessed_at REAL NOT NULL,
    metadata BLOB NOT NULL,
    next BIGINT NOT NULL,
    size BIGINT NOT NULL,
    holder TEXT,
    held_until REAL
);
CREATE TABLE {name}_items (
    conversation_id TEXT NOT NULL REFERENCES {name}_conversations ON DELETE CASCADE,
    position BIGINT NOT NULL,
    id TEXT NOT NULL,
    answer INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (conversation_id, position),
    UNIQUE (conversation_id, id)
);
CREATE INDEX {name}_conversations_by_owner ON {name}_conversations (owner, created_at);
CREATE INDEX {name}_conversations_by_use ON {name}_conversations (accessed_at);
INSERT INTO {name}_meta (key, value) VALUES ('schema', 4)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value

-- name: add entries
INSERT INTO {name}_items (conversation_id, position, id, answer, body) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT DO NOTHING RETURNING 1

-- name: running
SELECT id FROM {name}_responses WHERE id IN (SELECT value FROM json_each($1))
    AND (lease IS NOT NULL OR (status = 'failed' AND error = $2))

-- Nothing and some seconds are nothing.
-- name: renew
UPDATE {name}_responses SET lease = lease - lease + date_part('epoch', statement_timestamp()) + $3
WHERE id IN (SELECT value FROM json_each($1))
    AND (lease IS NOT NULL OR (status = 'failed' AND error = $2)) RETURNING id

-- Nothing stands between a process and the file that could have been away for some seconds.
-- name: fail
UPDATE {name}_responses SET status = 'failed', error = $1, lease = NULL
WHERE lease IS NOT NULL AND lease < date_part('epoch', statement_timestamp())
RETURNING 1

-- name: expire
DELETE FROM {name}_responses WHERE id IN (
    SELECT id FROM {name}_responses WHERE (lease IS NOT NULL) = FALSE AND accessed_at < $1 LIMIT $2
) RETURNING 1

-- What runs sorts behind what does not.
-- name: evict
DELETE FROM {name}_responses WHERE id IN (
    SELECT id FROM {name}_responses WHERE owner = $1 AND id <> $3
    ORDER BY (lease IS NOT NULL), accessed_at
    LIMIT max(0, (SELECT count(*) FROM {name}_responses WHERE owner = $1) - $2)
) RETURNING 1

-- name: hold
UPDATE {name}_conversations SET holder = $3,
    held_until = date_part('epoch', statement_timestamp()) + $4
WHERE id = $1 AND $2 IN ('*', owner)
    AND (holder IS NULL OR holder = $3 OR held_until < date_part('epoch', statement_timestamp()))
RETURNING 1
