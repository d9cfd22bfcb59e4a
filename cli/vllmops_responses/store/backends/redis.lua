-- Every operation on stored responses, each atomic. KEYS[1] is what all keys begin with, in braces,
-- so that in a cluster they lie together. ARGV[1] is the operation, ARGV[2] the client's clock.
--
-- r:ID        a response, a hash          e:ID    its log, a sorted set by last sequence number
-- all, o:OWNER, m:MODEL, s:STATUS         ids by creation
-- used        ids of what has finished by last use; to read writes nothing, as each write may wait
--             for the disk: what was used comes along with the next write
-- u:OWNER     ids of an owner's by last use, those that run behind all others
-- owners      owners by how many they have; of as many he is highest who stored nothing for longest
-- leases      ids of what runs, by the end of the lease, on this server's clock
-- c:ID        a conversation, a hash       ci:ID   its items, a hash: 1 or 0, then the body
-- cp:ID       ids of its items by position
-- conversations, co:OWNER                 ids of conversations by creation
-- conversations_used, cu:OWNER            ids of conversations by last use
-- conversation_owners                     owners by how many they have
-- evictions   how many, ever              schema  its version
-- built       how far a store of schema 1 has come on its way to 2; `busy` was its

local root, operation, now = KEYS[1], ARGV[1], ARGV[2]
local fields = {'owner', 'model', 'status', 'created_at', 'previous_id', 'error', 'body', 'input'}

-- What stands before a time of use so that it is behind all others, and what a number of responses
-- counts beside a time.
local behind, weight = 1e11, 2 ^ 32

-- Lua passes at most 8,000 values to a function. So an operation gets the first ones, and takes what
-- there may be many of from here, behind as many as are its own.
local FEW = 40

local function many(own)
  local found = {}
  for i = 3 + own, #ARGV do found[#found + 1] = ARGV[i] end
  return found
end

local function key(kind, name) return root .. kind .. name end

local function clock()
  local time = redis.call('TIME')
  return time[1] + time[2] / 1000000
end

local function running(status) return status == 'queued' or status == 'in_progress' end

local function one_of(word, words) return string.find(words, ' ' .. word .. ' ', 1, true) ~= nil end

-- When a response was used, as its owner's set has it.
local function place(status, at)
  return string.format('%.6f', running(status) and behind + at or at)
end

local function use(id, owner, status)
  if not running(status) then redis.call('ZADD', root .. 'used', now, id) end
  redis.call('ZADD', key('u:', owner), place(status, now), id)
end

-- Note how many an owner has, who may have stored something that was made at some time.
local function count(owner, made_at)
  local held = redis.call('ZCARD', key('o:', owner))
  if held == 0 then
    redis.call('ZREM', root .. 'owners', owner)
    return
  end
  local before = redis.call('ZSCORE', root .. 'owners', owner)
  local rest = before and before % weight or weight - 1
  if made_at then
    rest = math.min(rest, weight - 1 - math.floor(math.max(0, math.min(tonumber(made_at), weight - 1))))
  end
  redis.call('ZADD', root .. 'owners', string.format('%.0f', held * weight + rest), owner)
end

-- Note uses, some seconds ago: times and ids, as JSON. What was dropped meanwhile stays so.
local function note(uses)
  if uses == '[]' then return end
  uses = cjson.decode(uses)
  for i = 1, #uses, 1000 do
    redis.call('ZADD', root .. 'used', 'XX', 'GT', unpack(uses, i, math.min(i + 999, #uses)))
  end
  for i = 1, #uses, 2 do
    local found = redis.call('HMGET', key('r:', uses[i + 1]), 'owner', 'status')
    if found[1] then
      redis.call('ZADD', key('u:', found[1]), 'XX', 'GT', place(found[2], uses[i]), uses[i + 1])
    end
  end
end

local function lease(id, seconds)
  redis.call('ZADD', root .. 'leases', string.format('%.6f', clock() + seconds), id)
end

-- Give a response another status, and all that follows from it.
local function turn(id, from, to, created_at, lease_s, events_kept_s)
  redis.call('HSET', key('r:', id), 'status', to)
  redis.call('ZREM', key('s:', from), id)
  redis.call('ZADD', key('s:', to), created_at, id)
  redis.call('ZREM', root .. 'used', id)
  use(id, redis.call('HGET', key('r:', id), 'owner'), to)
  if running(to) then
    lease(id, lease_s)
    redis.call('PERSIST', key('e:', id))  -- it may have been over, and runs again
  else
    redis.call('ZREM', root .. 'leases', id)
    redis.call('PEXPIRE', key('e:', id), math.floor(events_kept_s * 1000))
  end
end

local function drop(id)
  local found = redis.call('HMGET', key('r:', id), 'owner', 'model', 'status')
  if found[1] then
    redis.call('ZREM', key('o:', found[1]), id)
    redis.call('ZREM', key('u:', found[1]), id)
    count(found[1])
    redis.call('ZREM', key('m:', found[2]), id)
    redis.call('ZREM', key('s:', found[3]), id)
  end
  for _, name in ipairs({'all', 'used', 'leases'}) do redis.call('ZREM', root .. name, id) end
  redis.call('DEL', key('r:', id), key('e:', id))
end

-- Fail what nobody renews, but not right after this server has been away itself.
local function fail(lease_s, events_kept_s, gone)
  local time = clock()
  local lapsed = redis.call('ZRANGEBYSCORE', root .. 'leases', '-inf', string.format('%.6f', time))
  if #lapsed == 0 then return 0 end
  local up = string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')
  if up and tonumber(up) < lease_s then return 0 end
  for _, id in ipairs(lapsed) do
    local found = redis.call('HMGET', key('r:', id), 'status', 'created_at')
    if found[1] then
      turn(id, found[1], 'failed', found[2], lease_s, events_kept_s)
      redis.call('HSET', key('r:', id), 'error', gone)
    else
      drop(id)
    end
  end
  return #lapsed
end

-- Drop what an owner used longest ago, and what runs only in need; whether there was anything.
local function give(owner, spared)
  -- The second has what an older version stores beside this one.
  for _, set in ipairs({key('u:', owner), key('o:', owner)}) do
    for _, id in ipairs(redis.call('ZRANGE', set, 0, 1)) do
      if id ~= spared then
        drop(id)
        redis.call('ZREM', set, id)
        redis.call('INCR', root .. 'evictions')
        return true
      end
    end
  end
  return false
end

-- Bring an owner down to a share.
local function reduce(owner, share, spared)
  local evicted = 0
  while redis.call('ZCARD', key('o:', owner)) > share and give(owner, spared) do
    evicted = evicted + 1
  end
  return evicted
end

-- Bring all together down to so many, by taking from whoever has most.
local function evict(max_size, spared)
  local evicted = 0
  while redis.call('ZCARD', root .. 'all') > max_size do
    local full = redis.call('ZREVRANGE', root .. 'owners', 0, 1)
    if not ((full[1] and give(full[1], spared)) or (full[2] and give(full[2], spared))) then break end
    evicted = evicted + 1
  end
  return evicted
end

-- A response's fields behind its id, or nothing where the owner has none.
local function seen(id, owner)
  local found = redis.call('HMGET', key('r:', id), unpack(fields))
  if not found[1] or (owner ~= '*' and owner ~= found[1]) then return nil end
  return {id, unpack(found)}
end

-- Whether there is the very run, and its status.
local function run(id, owner, created_at)
  local found = redis.call('HMGET', key('r:', id), 'owner', 'created_at', 'status')
  if found[1] == owner and found[2] == created_at then return found[3] end
  return nil
end

-- Whether it was taken for lost, and its outcome may yet come.
local function lapsed(id, gone)
  local found = redis.call('HMGET', key('r:', id), 'status', 'error')
  return found[1] == 'failed' and found[2] == gone
end

local commands = {}

function commands.create(id, owner, model, status, created_at, previous_id, error, body, input,
                         lease_s, max_size, share, uses)
  note(uses)
  if redis.call('EXISTS', key('r:', id)) == 1 then return 0 end
  redis.call('HSET', key('r:', id), 'owner', owner, 'model', model, 'status', status,
    'created_at', created_at, 'previous_id', previous_id, 'error', error, 'body', body,
    'input', input)
  redis.call('ZADD', root .. 'all', created_at, id)
  redis.call('ZADD', key('o:', owner), created_at, id)
  redis.call('ZADD', key('m:', model), created_at, id)
  redis.call('ZADD', key('s:', status), created_at, id)
  count(owner, created_at)
  use(id, owner, status)
  if running(status) then lease(id, lease_s) end
  reduce(owner, tonumber(share), id)
  evict(tonumber(max_size), id)
  return 1
end

function commands.put(id, owner, created_at, unless, status, error, body, lease_s, events_kept_s,
                      gone)
  local from = run(id, owner, created_at)
  if not from or (one_of(from, unless) and not lapsed(id, gone)) then return 0 end
  redis.call('HSET', key('r:', id), 'error', error, 'body', body)
  turn(id, from, status, created_at, tonumber(lease_s), tonumber(events_kept_s))
  return 1
end

function commands.set_status(id, owner, allowed, status, error, lease_s, events_kept_s)
  local found = seen(id, owner)
  if not found then return {} end
  if not one_of(found[4], allowed) then return {0, found} end
  redis.call('HSET', key('r:', id), 'error', error)
  turn(id, found[4], status, found[5], tonumber(lease_s), tonumber(events_kept_s))
  return {1, seen(id, owner)}
end

function commands.get(id, owner, lease_s, events_kept_s, gone)
  local found = seen(id, owner)
  if found and running(found[4]) then
    if fail(tonumber(lease_s), tonumber(events_kept_s), gone) > 0 then found = seen(id, owner) end
  end
  return found or {}
end

function commands.delete(id, owner)
  if not seen(id, owner) then return 0 end
  drop(id)
  return 1
end

-- As a model: it may be any. No text of a client's has it.
local ANY = '\0'

-- A page, or as much of it as `most` entries hold: the rest begins behind the last one looked at.
function commands.page(owner, model, status, upwards, from, from_id, to, to_id, limit, most)
  local set = root .. 'all'
  local least = redis.call('ZCARD', set)
  for kind, name in pairs({o = owner, m = model, s = status}) do
    if name ~= (kind == 'm' and ANY or '*') then
      local size = redis.call('ZCARD', key(kind .. ':', name))
      if size <= least then set, least = key(kind .. ':', name), size end
    end
  end
  upwards = upwards == '1'
  local rank = 0
  if from ~= '' then
    rank = upwards and redis.call('ZCOUNT', set, '-inf', '(' .. from)
      or redis.call('ZCOUNT', set, '(' .. from, '+inf')
  end
  local range = upwards and 'ZRANGE' or 'ZREVRANGE'
  local found, looked, last = {}, 0, {}
  local function beyond(score, id, at, at_id)
    local a, b = tonumber(score), tonumber(at)
    if a ~= b then return (a > b) == upwards end
    return id ~= at_id and (id > at_id) == upwards
  end
  while looked < tonumber(most) do
    local part = redis.call(range, set, rank + looked, rank + looked + 99, 'WITHSCORES')
    for i = 1, #part, 2 do
      local id, score = part[i], part[i + 1]
      if to ~= '' and not beyond(to, to_id, score, id) then return {found} end
      if from == '' or beyond(score, id, from, from_id) then
        local each = redis.call('HMGET', key('r:', id), 'owner', 'model', 'status')
        if each[1] and (owner == '*' or owner == each[1]) and (model == ANY or model == each[2])
            and (status == '*' or status == each[3]) then
          found[#found + 1] = seen(id, '*')
          if #found >= tonumber(limit) then return {found} end
        end
      end
      last = {score, id}
    end
    looked = looked + 100
    if #part < 200 then return {found} end
  end
  return {found, last[1], last[2]}
end

function commands.cursor(id, owner)
  local found = seen(id, owner)
  return found and found[5] or false
end

function commands.conversation(id, owner, lease_s, events_kept_s, gone)
  fail(tonumber(lease_s), tonumber(events_kept_s), gone)
  local found, known = {}, {}
  while id ~= '' and not known[id] do
    local each = seen(id, owner)
    if not each then break end
    known[id] = true
    found[#found + 1] = each
    id = each[6]
  end
  return found
end

function commands.touch(owner)
  for _, id in ipairs(many(1)) do
    local found = redis.call('HMGET', key('r:', id), 'owner', 'status')
    if found[1] and (owner == '*' or owner == found[1]) then use(id, found[1], found[2]) end
  end
  return 1
end

function commands.note(uses)
  note(uses)
  return 1
end

function commands.running(renewed_s, gone)
  local found = {}
  for _, id in ipairs(many(2)) do
    if redis.call('ZSCORE', root .. 'leases', id) then
      if renewed_s ~= '' then lease(id, tonumber(renewed_s)) end
      found[#found + 1] = id
    elseif lapsed(id, gone) then
      found[#found + 1] = id
    end
  end
  return found
end

function commands.append(id, owner, created_at, first, last, events, max_events, events_kept_s)
  local status = run(id, owner, created_at)
  if not status then return 0 end
  local log = key('e:', id)
  if redis.call('ZCOUNT', log, first, last) == 0 then
    redis.call('ZADD', log, last, first .. ':' .. last .. ':' .. events)
    redis.call('ZREMRANGEBYSCORE', log, '-inf', last - max_events)
  end
  if not running(status) then redis.call('PEXPIRE', log, math.floor(events_kept_s * 1000)) end
  return 1
end

function commands.log(id, owner, after, lease_s, events_kept_s, gone)
  local found = commands.get(id, owner, lease_s, events_kept_s, gone)
  if not found[1] then return {} end
  return {found[4], redis.call('ZRANGEBYSCORE', key('e:', id), '(' .. after, '+inf')}
end

function commands.fail(lease_s, events_kept_s, gone)
  return fail(tonumber(lease_s), tonumber(events_kept_s), gone)
end

function commands.expire(oldest, most)
  local found = redis.call('ZRANGEBYSCORE', root .. 'used', '-inf', '(' .. oldest,
    'LIMIT', 0, tonumber(most))
  for _, id in ipairs(found) do drop(id) end
  return #found
end

function commands.evict(max_size, share)
  local evicted = 0
  local most = string.format('%.0f', (share + 1) * weight)
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', root .. 'owners', most, '+inf')) do
    evicted = evicted + reduce(owner, tonumber(share), '')
  end
  return evicted + evict(tonumber(max_size), '')
end

-- Give some of what schema 1 has stored the sets that it did not have; how many it looked at.
function commands.build(version, most)
  local rank = tonumber(redis.call('GET', root .. 'built') or 0)
  local part = redis.call('ZRANGE', root .. 'all', rank, rank + most - 1, 'WITHSCORES')
  for i = 1, #part, 2 do
    local id = part[i]
    local found = redis.call('HMGET', key('r:', id), 'owner', 'status')
    if found[1] then
      local at = redis.call('ZSCORE', root .. 'used', id) or redis.call('ZSCORE', root .. 'busy', id)
      redis.call('ZADD', key('u:', found[1]), 'NX', place(found[2], at or now), id)
      count(found[1], part[i + 1])
    end
  end
  redis.call('SET', root .. 'built', rank + #part / 2)
  if #part / 2 < tonumber(most) then
    redis.call('DEL', root .. 'built', root .. 'busy')
    redis.call('SET', root .. 'schema', version)
  end
  return #part / 2
end

-- How many there are by status and model from some rank on, and their bytes.
function commands.stats(owner, rank, most)
  local set = owner == '*' and root .. 'all' or key('o:', owner)
  local ids = redis.call('ZRANGE', set, rank, rank + most - 1)
  local statuses, models, owners, bytes, event_bytes = {}, {}, {}, 0, 0
  for _, id in ipairs(ids) do
    local found = redis.call('HMGET', key('r:', id), 'status', 'model', 'owner')
    if found[1] then
      owners[found[3]] = (owners[found[3]] or 0) + 1
      statuses[found[1]] = (statuses[found[1]] or 0) + 1
      models[found[2]] = (models[found[2]] or 0) + 1
      bytes = bytes + redis.call('HSTRLEN', key('r:', id), 'body')
        + redis.call('HSTRLEN', key('r:', id), 'input')
      for _, chunk in ipairs(redis.call('ZRANGE', key('e:', id), 0, -1)) do
        event_bytes = event_bytes + #chunk
      end
    end
  end
  return {#ids, cjson.encode(statuses), cjson.encode(models), bytes, event_bytes,
    redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2] or '',
    tonumber(redis.call('GET', root .. 'evictions') or 0), cjson.encode(owners)}
end

-- The schema's version once there is one, and the server's.
function commands.open(version)
  redis.call('SETNX', root .. 'schema', version)
  return {tonumber(redis.call('GET', root .. 'schema')),
    string.match(redis.call('INFO', 'server'), 'redis_version:(%d+%.%d+)') or ''}
end

-- Conversations

local function conversation(id, owner)
  local found = redis.call('HMGET', key('c:', id), 'owner', 'created_at', 'metadata')
  if not found[1] or (owner ~= '*' and owner ~= found[1]) then return nil end
  return {id, found[1], found[2], found[3], redis.call('ZCARD', key('cp:', id))}
end

local function use_conversation(id, owner, at)
  redis.call('ZADD', root .. 'conversations_used', 'GT', at, id)
  redis.call('ZADD', key('cu:', owner), 'GT', at, id)
end

-- Who holds a conversation, unless that has lapsed.
local function holder(id)
  local found = redis.call('HMGET', key('c:', id), 'holder', 'held_until')
  if found[1] and tonumber(found[2]) >= clock() then return found[1] end
  return nil
end

-- Why somebody can't change the items of a conversation, if he can't.
local function hindered(id, owner, by)
  if not conversation(id, owner) then return 'gone' end
  if by ~= '' then
    if redis.call('HGET', key('c:', id), 'holder') ~= by then return 'locked' end
  elseif holder(id) then
    return 'locked'
  end
  return nil
end

local function drop_conversation(id)
  local owner = redis.call('HGET', key('c:', id), 'owner')
  if owner then
    redis.call('ZREM', key('co:', owner), id)
    redis.call('ZREM', key('cu:', owner), id)
    local held = redis.call('ZCARD', key('co:', owner))
    if held == 0 then
      redis.call('ZREM', root .. 'conversation_owners', owner)
    else
      redis.call('ZADD', root .. 'conversation_owners', held, owner)
    end
  end
  redis.call('ZREM', root .. 'conversations', id)
  redis.call('ZREM', root .. 'conversations_used', id)
  redis.call('DEL', key('c:', id), key('ci:', id), key('cp:', id))
end

-- Drop what an owner used longest ago, and what is held only in need; whether there was anything.
local function give_conversation(owner, spared)
  local last = nil
  for _, id in ipairs(redis.call('ZRANGE', key('cu:', owner), 0, -1)) do
    if id ~= spared then
      if not holder(id) then
        drop_conversation(id)
        return true
      end
      last = last or id
    end
  end
  if last then drop_conversation(last) end
  return last ~= nil
end

local function reduce_conversations(owner, share, spared)
  while redis.call('ZCARD', key('co:', owner)) > share and give_conversation(owner, spared) do end
end

-- Who has most, and of as many who has stored nothing for longest.
local function fullest_owner(spared)
  local top = redis.call('ZREVRANGE', root .. 'conversation_owners', 0, 0, 'WITHSCORES')
  if not top[1] then return nil end
  local found, least
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', root .. 'conversation_owners', top[2], top[2],
      'LIMIT', 0, 1000)) do
    local newest = redis.call('ZREVRANGE', key('co:', owner), 0, 0, 'WITHSCORES')
    local alone = tonumber(top[2]) == 1 and newest[1] == spared
    if not alone and (not least or tonumber(newest[2]) < least) then
      found, least = owner, tonumber(newest[2])
    end
  end
  return found
end

local function evict_conversations(max_size, spared)
  while redis.call('ZCARD', root .. 'conversations') > max_size do
    local owner = fullest_owner(spared)
    if not owner or not give_conversation(owner, spared) then return end
  end
end

-- Whether the ids of items are free, and each is another one.
local function free(id, given)
  local seen = {}
  for i = 1, #given, 3 do
    if seen[given[i]] or redis.call('HEXISTS', key('ci:', id), given[i]) == 1 then return false end
    seen[given[i]] = true
  end
  return true
end

local function put_items(id, given)
  local count = #given / 3
  local at = tonumber(redis.call('HINCRBY', key('c:', id), 'next', count)) - count
  for i = 1, #given, 3 do
    redis.call('HSET', key('ci:', id), given[i], given[i + 1] .. given[i + 2])
    redis.call('ZADD', key('cp:', id), at, given[i])
    at = at + 1
  end
end

-- Ids and values of items behind a first word.
local function with_values(id, names, first)
  local found = {first}
  for i = 1, #names, 1000 do
    local last = math.min(i + 999, #names)
    local values = redis.call('HMGET', key('ci:', id), unpack(names, i, last))
    for j = i, last do
      found[#found + 1] = names[j]
      found[#found + 1] = values[j - i + 1]
    end
  end
  return found
end

function commands.create_conversation(id, owner, created_at, metadata, max_size, share)
  local given = many(6)
  if redis.call('EXISTS', key('c:', id)) == 1 or not free(id, given) then return 'taken' end
  redis.call('HSET', key('c:', id), 'owner', owner, 'created_at', created_at, 'metadata', metadata)
  put_items(id, given)
  redis.call('ZADD', root .. 'conversations', created_at, id)
  redis.call('ZADD', key('co:', owner), created_at, id)
  redis.call('ZADD', root .. 'conversation_owners', redis.call('ZCARD', key('co:', owner)), owner)
  use_conversation(id, owner, now)
  reduce_conversations(owner, tonumber(share), id)
  evict_conversations(tonumber(max_size), id)
  return 'done'
end

function commands.get_conversation(id, owner) return conversation(id, owner) or {} end

function commands.set_metadata(id, owner, metadata)
  local found = conversation(id, owner)
  if not found then return {} end
  redis.call('HSET', key('c:', id), 'metadata', metadata)
  use_conversation(id, found[2], now)
  return conversation(id, owner)
end

function commands.delete_conversation(id, owner)
  if not conversation(id, owner) then return 0 end
  drop_conversation(id)
  return 1
end

function commands.list_conversations(owner, after, limit)
  local set = owner == '*' and root .. 'conversations' or key('co:', owner)
  local first = 0
  if after ~= '' then
    local rank = redis.call('ZREVRANK', set, after)
    if not rank then return false end
    first = rank + 1
  end
  local found = {}
  for _, id in ipairs(redis.call('ZREVRANGE', set, first, first + limit - 1)) do
    found[#found + 1] = conversation(id, '*')
  end
  return found
end

function commands.hold(id, owner, by, lease_s)
  local found = conversation(id, owner)
  if not found then return {'gone'} end
  local other = holder(id)
  if other and other ~= by then return {'locked'} end
  redis.call('HSET', key('c:', id), 'holder', by, 'held_until',
    string.format('%.6f', clock() + lease_s))
  use_conversation(id, found[2], now)
  return with_values(id, redis.call('ZRANGE', key('cp:', id), 0, -1), 'done')
end

function commands.renew_holds(lease_s)
  local pairs_of = many(1)
  for i = 1, #pairs_of, 2 do
    if redis.call('HGET', key('c:', pairs_of[i]), 'holder') == pairs_of[i + 1] then
      redis.call('HSET', key('c:', pairs_of[i]), 'held_until',
        string.format('%.6f', clock() + lease_s))
    end
  end
  return 1
end

function commands.release(id, by)
  if redis.call('HGET', key('c:', id), 'holder') == by then
    redis.call('HDEL', key('c:', id), 'holder', 'held_until')
  end
  return 1
end

function commands.page_entries(id, owner, after, limit, descending)
  if not conversation(id, owner) then return {'gone'} end
  local down = descending == '1'
  local first = 0
  if after ~= '' then
    local rank = redis.call(down and 'ZREVRANK' or 'ZRANK', key('cp:', id), after)
    if not rank then return {'unknown'} end
    first = rank + 1
  end
  local names = redis.call(down and 'ZREVRANGE' or 'ZRANGE', key('cp:', id), first,
    first + limit - 1)
  return with_values(id, names, 'done')
end

function commands.get_entry(id, owner, name)
  if not conversation(id, owner) then return {} end
  local value = redis.call('HGET', key('ci:', id), name)
  return value and {name, value} or {}
end

function commands.delete_entry(id, owner, name)
  local why = hindered(id, owner, '')
  if why then return why end
  if redis.call('HDEL', key('ci:', id), name) == 0 then return 'gone' end
  redis.call('ZREM', key('cp:', id), name)
  redis.call('HDEL', key('c:', id), 'holder', 'held_until')
  use_conversation(id, redis.call('HGET', key('c:', id), 'owner'), now)
  return 'done'
end

-- A response is stored by the operation of that name, with so many values; then come the items.
function commands.add_entries(id, owner, by, most, storing, count, ...)
  local given = many(6 + count)
  local why = hindered(id, owner, by)
  if why then return why end
  if not free(id, given) then return 'taken' end
  local size = redis.call('ZCARD', key('cp:', id)) + #given / 3
  if by == '' and size > tonumber(most) then return 'full' end
  if storing ~= '' and commands[storing](unpack({...}, 1, tonumber(count))) == 0 then
    return 'refused'
  end
  put_items(id, given)
  redis.call('HDEL', key('c:', id), 'holder', 'held_until')
  use_conversation(id, redis.call('HGET', key('c:', id), 'owner'), now)
  return 'done'
end

-- Ids and times, in turn.
function commands.use_conversations()
  local uses = many(0)
  for i = 1, #uses, 2 do
    local owner = redis.call('HGET', key('c:', uses[i]), 'owner')
    if owner then use_conversation(uses[i], owner, uses[i + 1]) end
  end
  return 1
end

function commands.expire_conversations(oldest, most)
  local dropped = 0
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', root .. 'conversations_used', '-inf',
      '(' .. oldest, 'LIMIT', 0, tonumber(most))) do
    if not holder(id) then
      drop_conversation(id)
      dropped = dropped + 1
    end
  end
  return dropped
end

function commands.evict_conversations(max_size, share)
  for _, owner in ipairs(redis.call('ZRANGEBYSCORE', root .. 'conversation_owners',
      '(' .. share, '+inf')) do
    reduce_conversations(owner, tonumber(share), '')
  end
  evict_conversations(tonumber(max_size), '')
  return 1
end

-- A server that is no primary any more would answer a reader with what it happens to have: nothing is
-- deleted here, and that is refused there.
local refused = redis.pcall('DEL', root)
if type(refused) == 'table' and string.find(refused.err, 'READONLY', 1, true) then
  return refused
end
return commands[operation](unpack(ARGV, 3, math.min(#ARGV, 2 + FEW)))
