-- Statements that SQLite and PostgreSQL share, each by its name; what they do not share is in
-- sqlite.sql and postgresql.sql. {name} is what the tables' names begin with, and nothing else is
-- put into a text. Words, a set of statuses, is one text with spaces around each.

-- name: meta
CREATE TABLE IF NOT EXISTS {name}_meta (key TEXT PRIMARY KEY, value BIGINT NOT NULL)

-- name: meta get
SELECT value FROM {name}_meta WHERE key = $1

-- name: meta add
INSERT INTO {name}_meta (key, value) VALUES ($1, $2)
    ON CONFLICT (key) DO UPDATE SET value = {name}_meta.value + $2

-- Most are completed: a list of those finds them without an index by status.
-- name: schema 2
CREATE INDEX {name}_by_age ON {name}_responses (created_at);
CREATE INDEX {name}_by_owner ON {name}_responses (owner, created_at);
CREATE INDEX {name}_by_model ON {name}_responses (model, created_at);
CREATE INDEX {name}_by_status ON {name}_responses (status, created_at) WHERE status <> 'completed';
CREATE INDEX {name}_by_use ON {name}_responses ((lease IS NOT NULL), accessed_at);
CREATE INDEX {name}_by_lease ON {name}_responses (lease) WHERE lease IS NOT NULL;
CREATE INDEX {name}_events_by_age ON {name}_events (written_at);
INSERT INTO {name}_meta (key, value) VALUES ('schema', 2)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value

-- name: schema 3
CREATE INDEX {name}_by_share ON {name}_responses (owner, (lease IS NOT NULL), accessed_at);
INSERT INTO {name}_meta (key, value) VALUES ('schema', 3)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value

-- name: drop
DROP TABLE IF EXISTS {name}_items;
DROP TABLE IF EXISTS {name}_conversations;
DROP TABLE IF EXISTS {name}_events;
DROP TABLE IF EXISTS {name}_responses;
DROP TABLE IF EXISTS {name}_meta

-- name: create
INSERT INTO {name}_responses (
    id, owner, model, status, created_at, previous_id, error, body, input, accessed_at, lease
) VALUES (
    $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, date_part('epoch', statement_timestamp()) + $11
) ON CONFLICT (id) DO NOTHING RETURNING id

-- name: put
UPDATE {name}_responses SET status = $4, error = $5, body = $6, accessed_at = $7,
    lease = date_part('epoch', statement_timestamp()) + $8
WHERE id = $1 AND owner = $2 AND created_at = $3
    AND ($10 NOT LIKE '% ' || status || ' %' OR (status = 'failed' AND error = $9)) RETURNING 1

-- name: set status
UPDATE {name}_responses SET status = $3, error = $4,
    lease = date_part('epoch', statement_timestamp()) + $5
WHERE id = $1 AND $2 IN ('*', owner) AND $6 LIKE '% ' || status || ' %'
RETURNING id, owner, model, status, created_at, previous_id, error, body, input

-- What reads tells of each row, last, whether its lease has lapsed.
-- name: get
SELECT id, owner, model, status, created_at, previous_id, error, body, input,
    lease < date_part('epoch', statement_timestamp())
FROM {name}_responses WHERE id = $1 AND $2 IN ('*', owner)

-- name: delete
DELETE FROM {name}_responses WHERE id = $1 AND $2 IN ('*', owner) RETURNING 1

-- name: touch
UPDATE {name}_responses SET accessed_at = $3
WHERE id = $1 AND $2 IN ('*', owner) AND accessed_at < $3

-- So that turns are looked up by their ids, the one before is a subquery of its own, and no index
-- fits the owner: before it has analyzed a table PostgreSQL takes an owner's responses for few, and
-- went through all of them for each turn. Turns are so many at most that a chain that bites its own
-- tail ends, and each is read once.
-- name: conversation
WITH RECURSIVE turns (turn, previous, age) AS (
    SELECT id, previous_id, 0 FROM {name}_responses WHERE id = $1 AND $2 IN ('*', owner || '')
    UNION ALL
    SELECT previous, (
        SELECT previous_id FROM {name}_responses WHERE id = previous AND $2 IN ('*', owner)
    ), age + 1
    FROM turns WHERE previous IS NOT NULL AND age < 10000
)
SELECT id, owner, model, status, created_at, previous_id, error, body, input,
    lease < date_part('epoch', statement_timestamp())
FROM (SELECT turn, min(age) AS age FROM turns GROUP BY turn) AS chain
JOIN {name}_responses ON id = turn
WHERE $2 IN ('*', owner || '') ORDER BY age DESC

-- name: append
INSERT INTO {name}_events (response_id, first, last, written_at, events)
SELECT id, CAST($4 AS BIGINT), CAST($5 AS BIGINT), date_part('epoch', statement_timestamp()), $6
FROM {name}_responses WHERE id = $1 AND owner = $2 AND created_at = $3
ON CONFLICT (response_id, first) DO UPDATE SET written_at = excluded.written_at RETURNING 1

-- name: trim
DELETE FROM {name}_events WHERE response_id = $1 AND last <= $2

-- name: log
SELECT first, last, events FROM {name}_events WHERE response_id = $1 AND last > $2 ORDER BY first

-- name: cursor
SELECT created_at FROM {name}_responses WHERE id = $1 AND $2 IN ('*', owner)

-- A page is `page`, of each pair that follows one or the other condition, and an order: a condition
-- that is left open would keep SQLite from its index.
-- name: page
SELECT id, owner, model, status, created_at, previous_id, error, body, input
FROM {name}_responses WHERE TRUE

-- name: of owner
AND owner = $1

-- name: of any owner
AND $1 = '*'

-- name: of model
AND model = $2

-- name: of any model
AND CAST($2 AS TEXT) IS NULL

-- name: of completed
AND status = $3

-- The second half shows that the partial index fits.
-- name: of status
AND status = $3 AND status <> 'completed'

-- name: of any status
AND CAST($3 AS TEXT) IS NULL

-- name: from
AND (created_at, id) > ($4, $5)

-- name: from any
AND CAST($4 AS FLOAT) IS NULL AND CAST($5 AS TEXT) IS NULL

-- name: to
AND (created_at, id) < ($6, $7)

-- name: to any
AND CAST($6 AS FLOAT) IS NULL AND CAST($7 AS TEXT) IS NULL

-- name: upwards
ORDER BY created_at, id LIMIT $8

-- name: downwards
ORDER BY created_at DESC, id DESC LIMIT $8

-- An index has all that this needs; of owners with as many the one first who has stored nothing for
-- longest.
-- name: shares
SELECT owner, count(*) FROM {name}_responses WHERE $1 IN ('*', owner)
GROUP BY owner ORDER BY count(*) DESC, max(created_at)

-- Of a run that took long the first events are old when it ends: its last one says when that was.
-- name: forget
DELETE FROM {name}_events WHERE response_id IN (
    SELECT response_id FROM (
        SELECT DISTINCT response_id FROM {name}_events
        WHERE written_at < date_part('epoch', statement_timestamp()) - $1
    ) AS old JOIN {name}_responses ON id = response_id AND lease IS NULL
    WHERE (
        SELECT written_at FROM {name}_events AS last WHERE last.response_id = old.response_id
        ORDER BY first DESC LIMIT 1
    ) < date_part('epoch', statement_timestamp()) - $1
) RETURNING 1

-- name: stats
SELECT status, model, count(*), sum(length(body) + length(input)), min(created_at)
FROM {name}_responses WHERE $1 IN ('*', owner) GROUP BY status, model

-- name: event bytes
SELECT sum(length(events)) FROM {name}_events

-- What changes items ends a hold that has lapsed, and that holder adds none any more. Nobody's name
-- is empty.
-- name: create conversation
INSERT INTO {name}_conversations (id, owner, created_at, accessed_at, metadata, next, size)
VALUES ($1, $2, $3, $4, $5, $6, $6) ON CONFLICT (id) DO NOTHING RETURNING 1

-- name: get conversation
SELECT id, owner, created_at, metadata, size FROM {name}_conversations
WHERE id = $1 AND $2 IN ('*', owner)

-- name: set metadata
UPDATE {name}_conversations SET metadata = $3, accessed_at = $4
WHERE id = $1 AND $2 IN ('*', owner) RETURNING id, owner, created_at, metadata, size

-- name: delete conversation
DELETE FROM {name}_conversations WHERE id = $1 AND $2 IN ('*', owner) RETURNING 1

-- name: list conversations
SELECT id, owner, created_at, metadata, size FROM {name}_conversations
WHERE $1 IN ('*', owner)
    AND (CAST($2 AS FLOAT) IS NULL OR (created_at, id) < (CAST($2 AS FLOAT), $3))
ORDER BY created_at DESC, id DESC LIMIT $4

-- name: touch conversation
UPDATE {name}_conversations SET accessed_at = $2 WHERE id = $1 AND accessed_at < $2

-- name: renew hold
UPDATE {name}_conversations SET held_until = date_part('epoch', statement_timestamp()) + $3
WHERE id = $1 AND holder = $2

-- name: release
UPDATE {name}_conversations SET holder = NULL WHERE id = $1 AND holder = $2 RETURNING 1

-- name: change entries
UPDATE {name}_conversations SET holder = NULL,
    size = size + CAST($4 AS BIGINT),
    next = next + CASE WHEN CAST($4 AS BIGINT) > 0 THEN CAST($4 AS BIGINT) ELSE 0 END
WHERE id = $1 AND $2 IN ('*', owner) AND (
    holder = $3 OR ($3 = '' AND (
        holder IS NULL OR held_until < date_part('epoch', statement_timestamp())
    ))
) RETURNING next, size

-- name: entries
SELECT id, body, answer FROM {name}_items WHERE conversation_id = $1 ORDER BY position

-- name: entries upwards
SELECT id, body, answer FROM {name}_items
WHERE conversation_id = $1 AND position > COALESCE(CAST($2 AS BIGINT), -1)
ORDER BY position LIMIT $3

-- name: entries downwards
SELECT id, body, answer FROM {name}_items
WHERE conversation_id = $1 AND position < COALESCE(CAST($2 AS BIGINT), 9223372036854775807)
ORDER BY position DESC LIMIT $3

-- name: entry
SELECT items.id, items.body, items.answer, items.position
FROM {name}_items AS items JOIN {name}_conversations AS kept ON kept.id = conversation_id
WHERE conversation_id = $1 AND $2 IN ('*', kept.owner) AND items.id = $3

-- name: delete entry
DELETE FROM {name}_items WHERE conversation_id = $1 AND id = $2 RETURNING 1

-- name: expire conversations
DELETE FROM {name}_conversations WHERE id IN (
    SELECT id FROM {name}_conversations WHERE accessed_at < $1
        AND (holder IS NULL OR held_until < date_part('epoch', statement_timestamp()))
    ORDER BY accessed_at, id LIMIT $2
) RETURNING 1

-- name: conversation shares
SELECT owner, count(*) FROM {name}_conversations
GROUP BY owner ORDER BY count(*) DESC, max(created_at)

-- What is held sorts behind what is not.
-- name: evict conversations
DELETE FROM {name}_conversations WHERE id IN (
    SELECT id FROM {name}_conversations WHERE owner = $1 AND id <> $3
    ORDER BY (
        holder IS NOT NULL AND held_until >= date_part('epoch', statement_timestamp())
    ), accessed_at
    LIMIT (
        SELECT CASE WHEN count(*) > CAST($2 AS BIGINT) THEN count(*) - CAST($2 AS BIGINT) ELSE 0 END
        FROM {name}_conversations WHERE owner = $1
    )
) RETURNING 1
