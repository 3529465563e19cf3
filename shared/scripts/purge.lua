-- Purges (shared/purge.py): set tombstones, find entries, and replace values that have not changed.

-- Number of purges that the log keeps, each of up to 1,000 posts. A reader that missed some checks all of its posts.
local MAX_PURGES = 4000

-- Add a purge to the log, with the milliseconds since 1970 up to which results are gone. The clock may have been set
-- back, so this is at least the time of the newest result.
local function log_purge(field, value, ttl)
  local newest = newest_result()
  local till = math.max(math.floor(current_time() * 1000), newest and tonumber(string.match(newest[1], '^%d+')) or 0)
  redis.call('XADD', PURGES, 'MAXLEN', MAX_PURGES, '*', field, value, 'until', string.format('%d', till))
  redis.call('EXPIRE', PURGES, ttl)
end

--   ARGV[1]  time, in seconds since 1970    ARGV[2]  ttl, seconds    ARGV[3]  ids, as JSON
register('set_tombstones', SHRINKS, function(ARGV)
  for _, id in ipairs(cjson.decode(ARGV[3])) do redis.call('SET', TOMBSTONE .. id, ARGV[1], 'EX', ARGV[2]) end
  log_purge('ids', ARGV[3], ARGV[2])
end)

--   ARGV  a post's id, and the expected time of its tombstone, of each
--
-- Returns 1 for each post that has no tombstone now, else 0.
register('lift', SHRINKS, function(ARGV)
  local lifted = {}
  for i = 1, #ARGV, 2 do
    local key = TOMBSTONE .. ARGV[i]
    local at = redis.call('GET', key)
    if at == ARGV[i + 1] then redis.call('DEL', key) end
    lifted[#lifted + 1] = (not at or at == ARGV[i + 1]) and 1 or 0
  end
  return lifted
end)

--   ARGV[1]  feedmill:results or feedmill:dead
--   ARGV[2]  first id    ARGV[3]  bytes after which to stop
--   ARGV[4]  `id`, `author` (the beginning of an id up to its last slash) or `run`    ARGV[5]  {value: true, …}, as JSON
--
-- Reads ten entries at a time, because sizes vary widely. A dead letter without a post has the ids in its text. Returns
-- the id to continue from, "" after the last entry; and the entry id, post id and fingerprint of each entry with one of
-- the values, in a flat list. An entry with several ids can occur several times.
register('find_entries', READS, function(ARGV)
  local stream, from, wanted, found, bytes = ARGV[1], ARGV[2], cjson.decode(ARGV[5]), {}, 0
  local function value_of(id, post)
    if ARGV[4] == 'id' then return id end
    if ARGV[4] == 'author' then return string.match(id, '^.*/') end
    return string.find(post, '"run"', 1, true) and decoded(post).run
  end
  repeat
    local entries = redis.call('XRANGE', stream, from, '+', 'COUNT', 10)
    for _, entry in ipairs(entries) do
      local fields = by_name(entry[2])
      local result, post = fields.classification or '', fields.post or fields.letter or ''
      local ids = ARGV[4] ~= 'run' and fields.mentions and decoded(fields.mentions) or {fields.id or ''}
      for _, id in ipairs(ids) do
        local value = value_of(id, post)
        if value and wanted[value] then
          local n = #found
          found[n + 1], found[n + 2], found[n + 3] = entry[1], id, decoded(result).fingerprint or ''
        end
      end
      bytes = bytes + #result + #post
      from = '(' .. entry[1]
    end
    if #entries < 10 then return {'', found} end
  until bytes >= tonumber(ARGV[3])
  return {from, found}
end)

--   ARGV[1]  the run    ARGV[2]  ttl of the log, seconds
--
-- Deletes a run's counters, and logs the purge.
register('forget_run', SHRINKS, function(ARGV)
  redis.call('UNLINK', RUN .. ARGV[1])
  if not try('ZREM', RUNS, ARGV[1]) then redis.call('DEL', RUNS) end
  log_purge('run', ARGV[1], ARGV[2])
end)

--   ARGV[1]  entry id of a dead letter    ARGV[2]  its run, "" for none
register('remove_retried', SHRINKS, function(ARGV)
  if redis.call('XDEL', DEAD_LETTERS, ARGV[1]) == 1 then uncount(ARGV[2], 'failed', 1) end
end)

--   ARGV[1]  a list or hash    ARGV[2]  the expected value    ARGV[3]  the new value    ARGV[4]  a hash's field
--
-- Returns 1 if the value was there and was replaced, else 0.
register('replace', SHRINKS, function(ARGV)
  local key, before, after = ARGV[1], ARGV[2], ARGV[3]
  local kind = redis.call('TYPE', key).ok
  local at = kind == 'list' and redis.call('LPOS', key, before)
  if at then
    redis.call('LSET', key, at, after)
  elseif kind == 'hash' and redis.call('HGET', key, ARGV[4]) == before then
    redis.call('HSET', key, ARGV[4], after)
  else
    return 0
  end
  return 1
end)

--   ARGV[1]  a hash    ARGV[2]  a field    ARGV[3]  the expected value
--
-- Deletes the field if it has this value.
register('remove_field', SHRINKS, function(ARGV)
  if redis.call('HGET', ARGV[1], ARGV[2]) == ARGV[3] then redis.call('HDEL', ARGV[1], ARGV[2]) end
end)
