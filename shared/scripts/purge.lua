-- Purges (shared/purge.py, producers/purge_run.py): set tombstones, delete entries and records, and replace values that
-- have not changed.

-- Number of purges that the log keeps, each of up to 1,000 posts. A reader that missed some checks all of its posts.
local MAX_PURGES = 4000

-- Add a purge to the log, with the milliseconds since 1970 up to which results are gone. The clock may have been set
-- back, so this is at least the time of the newest result.
local function log_purge(log, results, field, value, ttl)
  local newest = newest_of(results)
  local till = math.max(math.floor(current_time() * 1000), newest and tonumber(string.match(newest[1], '^%d+')) or 0)
  redis.call('XADD', log, 'MAXLEN', MAX_PURGES, '*', field, value, 'until', string.format('%d', till))
  redis.call('EXPIRE', log, ttl)
end

-- Call `see` with the id and the fields of a stream's entries from the id `from`, until they have `limit` bytes. Reads
-- ten at a time, because sizes vary widely. Return the id to continue from; "" after the last entry.
local function walk(stream, from, limit, see)
  local bytes = 0
  repeat
    local entries = redis.call('XRANGE', stream, from, '+', 'COUNT', 10)
    for _, entry in ipairs(entries) do
      local fields = {}
      for i = 1, #entry[2], 2 do
        fields[entry[2][i]] = entry[2][i + 1]
        bytes = bytes + #entry[2][i + 1]
      end
      see(entry[1], fields)
      from = '(' .. entry[1]
    end
    if #entries < 10 then return '' end
  until bytes >= tonumber(limit)
  return from
end

local function set_of(text)
  local set = {}
  for _, item in ipairs(cjson.decode(text)) do set[item] = true end
  return set
end

-- Decode an object of JSON; return an empty one if it is invalid.
local function decoded(text)
  local valid, value = pcall(cjson.decode, text or '')
  return valid and type(value) == 'table' and value or {}
end

--   KEYS[1]  feedmill:purges, stream       KEYS[2]  feedmill:results, stream
--   ARGV[1]  time, in seconds since 1970    ARGV[2]  ttl, seconds    ARGV[3]  ids, as JSON    ARGV[4]  tombstones' prefix
register('set_tombstones', SHRINKS, function(KEYS, ARGV)
  for _, id in ipairs(cjson.decode(ARGV[3])) do redis.call('SET', ARGV[4] .. id, ARGV[1], 'EX', ARGV[2]) end
  log_purge(KEYS[1], KEYS[2], 'ids', ARGV[3], ARGV[2])
end)

--   KEYS  tombstones    ARGV  the expected time of each
--
-- Returns 1 for each post that has no tombstone now, else 0.
register('lift', SHRINKS, function(KEYS, ARGV)
  local lifted = {}
  for i, key in ipairs(KEYS) do
    local at = redis.call('GET', key)
    if at == ARGV[i] then redis.call('DEL', key) end
    lifted[i] = (not at or at == ARGV[i]) and 1 or 0
  end
  return lifted
end)

--   KEYS[1]  feedmill:results or feedmill:dead, stream
--   ARGV[1]  first id    ARGV[2]  bytes after which to stop    ARGV[3]  ids, as JSON
--
-- Returns the id to continue from, and the number of deleted entries.
register('purge', SHRINKS, function(KEYS, ARGV)
  local posts, deleted = set_of(ARGV[3]), 0
  local from = walk(KEYS[1], ARGV[1], ARGV[2], function(entry, fields)
    if posts[fields.id] then deleted = deleted + redis.call('XDEL', KEYS[1], entry) end
  end)
  return {from, deleted}
end)

--   KEYS, ARGV[1], ARGV[2]  as for `purge`    ARGV[3]  beginnings of ids, up to the last slash, as JSON
--
-- Returns the id to continue from, and the ids of posts that begin like this.
register('find_authors', READS, function(KEYS, ARGV)
  local authors, found = set_of(ARGV[3]), {}
  local from = walk(KEYS[1], ARGV[1], ARGV[2], function(_, fields)
    if authors[string.match(fields.id or '', '^.*/') or ''] then found[#found + 1] = fields.id end
  end)
  return {from, found}
end)

--   KEYS[1]  as for `purge`    KEYS[2], KEYS[3]  feedmill:sent-marks and feedmill:stored, tables
--   ARGV[1], ARGV[2]  as for `purge`    ARGV[3]  a run
--
-- Deletes the run's entries, the results that they announce, and the run's marks of their ids. Returns as `purge` does.
register('purge_run', SHRINKS, function(KEYS, ARGV)
  local deleted = 0
  local from = walk(KEYS[1], ARGV[1], ARGV[2], function(entry, fields)
    local text = fields.post or fields.letter or ''
    if not string.find(text, '"run"', 1, true) or decoded(text).run ~= ARGV[3] then return end
    deleted = deleted + redis.call('XDEL', KEYS[1], entry)
    local fingerprint = decoded(fields.classification).fingerprint
    if fields.id and fingerprint then forget_result(KEYS[3], fields.id, fingerprint) end
    if fields.id then
      local bucket, start = bucket_of(fields.id)
      forget_marks(KEYS[2], bucket, start .. digest_of(ARGV[3], RUN))
    end
  end)
  return {from, deleted}
end)

--   KEYS[1]  feedmill:run:<name>, hash     KEYS[2]  feedmill:runs, zset       KEYS[3]  feedmill:clears, hash
--   KEYS[4]  feedmill:purges, stream       KEYS[5]  feedmill:results, stream
--   ARGV[1]  the run                       ARGV[2]  ttl of the log, seconds   ARGV[3+]  queues
--
-- Deletes a run's counters, logs the purge, and makes the saved positions in files void: sending its file again would
-- skip its posts.
register('forget_run', SHRINKS, function(KEYS, ARGV)
  redis.call('UNLINK', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
  for i = 3, #ARGV do redis.call('HINCRBY', KEYS[3], ARGV[i], 1) end
  log_purge(KEYS[4], KEYS[5], 'run', ARGV[1], ARGV[2])
end)

--   KEYS[1]  feedmill:dead, stream    KEYS[2]  feedmill:run:<name>, hash    ARGV[1]  entry id of a dead letter
register('remove_retried', SHRINKS, function(KEYS, ARGV)
  local removed = redis.call('XDEL', KEYS[1], ARGV[1])
  if removed == 1 and tonumber(redis.call('HGET', KEYS[2], 'failed') or 0) > 0 then
    redis.call('HINCRBY', KEYS[2], 'failed', -1)
  end
end)

--   KEYS[1]  list, string, or hash    ARGV[1]  the expected value    ARGV[2]  the new value    ARGV[3]  a hash's field
--
-- Returns 1 if the value was there and was replaced, else 0.
register('replace', SHRINKS, function(KEYS, ARGV)
  local key, kind = KEYS[1], redis.call('TYPE', KEYS[1]).ok
  local at = kind == 'list' and redis.call('LPOS', key, ARGV[1])
  if at then
    redis.call('LSET', key, at, ARGV[2])
  elseif kind == 'string' and redis.call('GET', key) == ARGV[1] then
    redis.call('SET', key, ARGV[2], 'KEEPTTL')
  elseif kind == 'hash' and redis.call('HGET', key, ARGV[3]) == ARGV[1] then
    redis.call('HSET', key, ARGV[3], ARGV[2])
  else
    return 0
  end
  return 1
end)
