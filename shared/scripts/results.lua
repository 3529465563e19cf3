-- The results store (shared/results.py): write a micro-batch, find results, and store scores.

-- Most milliseconds between two activities of a run that count as time in use. In longer pauses, the run waited for a
-- worker, or its sender for a person.
local MAX_PAUSE_MS = 60000

-- Add `counts` (field -> number) to a run's counters and its time in use, once per call and not per post.
--
-- runs: feedmill:runs, zset. prefix: of the names of runs' keys. ttl: seconds. limit: runs listed. first: true when
-- posts are sent, because a run in which nothing is pending was not in use before.
local function count_progress(runs, prefix, run, counts, ttl, limit, first)
  local key, time = prefix .. run, current_time()
  local now = math.floor(time * 1000)
  local known = redis.call('HMGET', key, 'latest', 'sent', 'stored', 'failed')
  for i = 1, 4 do known[i] = tonumber(known[i] or 0) or 0 end
  local latest, sent, settled = known[1], known[2], known[3] + known[4]
  -- pcall: producers may write anything here, and results must be stored all the same.
  for field, count in pairs(counts) do redis.pcall('HINCRBY', key, field, count) end
  if latest == 0 then redis.call('HSETNX', key, 'began', now) end
  local pause = now - latest
  if pause > 0 and pause <= MAX_PAUSE_MS and not (first and settled >= sent) then
    redis.pcall('HINCRBY', key, 'used', pause)
  end
  redis.call('HSET', key, 'latest', now)
  redis.call('EXPIRE', key, math.ceil(ttl))
  redis.call('ZADD', runs, math.floor(time), run)
  redis.call('EXPIRE', runs, math.ceil(ttl))
  redis.call('ZREMRANGEBYRANK', runs, 0, -1 - limit)
end

-- Bytes of a stream entry beside its texts; 30 to 180 were measured, most with a node per entry. Rounds of trimming.
local ENTRY_BYTES, ROUNDS = 200, 10

-- Return the bytes of all entries ever added up to this one.
local function total_of(entry)
  for i = 1, entry and #entry[2] or 0, 2 do
    if entry[2][i] == 'total' then return tonumber(entry[2][i + 1]) end
  end
  return 0
end

local function newest_of(stream) return redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1] end

-- Return the bytes that the results stream takes. Purged entries count until they are the oldest ones.
local function bytes_of(stream)
  return total_of(newest_of(stream)) - total_of(redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1])
end

-- Trim the oldest entries of the results stream while it takes more than `limit` bytes. Return the bytes that it takes.
local function bound_stream(stream, limit)
  local used = 0
  for _ = 1, ROUNDS do
    used = bytes_of(stream)
    if used <= limit then break end
    redis.call('XTRIM', stream, 'MAXLEN', math.floor(redis.call('XLEN', stream) * limit / used))
  end
  return used
end

-- Drop what exceeds the memory of results (the stream may take `limits.stream` bytes of it) and of sent records.
--
-- keys: feedmill:results, stream; feedmill:counters, hash; feedmill:stored and feedmill:sent-marks, tables
local function bound_memory(keys, limits)
  local used = bound_stream(keys[1], limits.stream)
  local dropped = {dropped = drop(keys[3], limits.results - used), sent_dropped = drop(keys[4], limits.sent, limits.mark)}
  for field, count in pairs(dropped) do
    if count > 0 then redis.call('HINCRBY', keys[2], field, count) end
  end
end

-- Count new results by label in this hour. labels: label -> number.
local function count_labels(prefix, labels, limit, ttl)
  local hour = prefix .. math.floor(current_time() / 3600)
  local names, sums, room = {}, {}, limit - redis.call('HLEN', hour)
  for label in pairs(labels) do names[#names + 1] = label end
  for i, sum in ipairs(in_parts(names, 'HMGET', hour)) do
    if not sum then room = room - 1 end
    if sum or room >= 0 then
      sums[#sums + 1], sums[#sums + 2] = names[i], (sum or 0) + labels[names[i]]
    end
  end
  in_parts(sums, 'HSET', hour)
  redis.call('EXPIRE', hour, ttl)
end

--   KEYS[1] to KEYS[4]  as for bound_memory    KEYS[5]  feedmill:dead, stream    KEYS[6]  feedmill:runs, zset
--   ARGV[1]  the arguments of `_write_call` (shared/results.py), as JSON
--   ARGV[2]  the results' records, then those of their contexts
--   ARGV[3+] classification and post of each result; then the letter of each dead letter
--
-- Sets each result if absent, and appends new ones to the stream; skips purged posts, which a worker may have held.
-- Writes a dead letter unless the stream has one with its digest. Returns the numbers of new results and of trimmed dead
-- letters.
register('write', WRITES, function(KEYS, ARGV)
  local stream, counters, stored, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[5]
  local given, blob, at = cjson.decode(ARGV[1]), ARGV[2], 1
  local ids, changed, fields, labels, runs = given.ids, {}, {}, {}, {}
  local counts = {stored = 0, repeated = 0, failed = 0, gone = 0}
  local function count(run, what)
    counts[what] = counts[what] + 1
    if run ~= '' then
      runs[run] = runs[run] or {}
      runs[run][what] = (runs[run][what] or 0) + 1
    end
  end
  local function next_record()
    local length = struct.unpack('>I4', blob, at)
    at = at + length
    return string.sub(blob, at - length, at - 1)
  end
  local length, dead_length = redis.call('XLEN', stream), redis.call('XLEN', dead)
  if #ids > 0 then
    local purged, known, total = tombstones(given.tombstones, ids), records_of(stored, ids), total_of(newest_of(stream))
    local key = open(stored, given.ttl, given.limits.results - given.limits.stream)
    local own = in_parts(ids, 'HMGET', key)
    for i, id in ipairs(ids) do
      local record, records = next_record(), changed[id] or own[i] or ''
      local identity = string.sub(record, 6, HEAD)
      if purged[i] then
        counts.gone = counts.gone + 1
      elseif find_record(known[i], identity) or find_record(records, identity) then
        counts.repeated = counts.repeated + 1
      else
        local text, post, label = ARGV[1 + 2 * i], ARGV[2 + 2 * i], given.labels[i]
        total = total + ENTRY_BYTES + #id + #text + #post
        local sum = string.format('%.0f', total)
        redis.call('XADD', stream, '*', 'id', id, 'classification', text, 'post', post, 'total', sum)
        changed[id], labels[label] = records .. record, (labels[label] or 0) + 1
        count(given.runs[i], 'stored')
      end
    end
    if counts.stored > 0 then
      for id, records in pairs(changed) do fields[#fields + 1], fields[#fields + 2] = id, records end
      for _, context in ipairs(given.contexts) do fields[#fields + 1], fields[#fields + 2] = context, next_record() end
      add(key, fields, given.ttl)
      count_labels(given.hours, labels, given.max_labels, given.labels_ttl)
      redis.call('XTRIM', stream, 'MAXLEN', '~', given.length)
    end
  end
  for i, letter in ipairs(given.letters) do
    local id, name, run = unpack(letter)
    local entry = redis.call('GET', name)
    if redis.call('EXISTS', given.tombstones .. id) == 1 then
      counts.gone = counts.gone + 1
    elseif not entry or #redis.call('XRANGE', dead, entry, entry) == 0 then
      local text = ARGV[2 + 2 * #ids + i]
      entry = redis.call('XADD', dead, 'MAXLEN', '~', given.dead_length, '*', 'id', id, 'letter', text)
      redis.call('SET', name, entry, 'EX', given.ttl)
      count(run, 'failed')
    end
  end
  for run, found in pairs(runs) do
    count_progress(KEYS[6], given.run, run, found, given.run_ttl, given.max_runs)
  end
  if counts.stored > 0 then bound_memory(KEYS, given.limits) end
  counts.trimmed = length + counts.stored - redis.call('XLEN', stream)
  counts.dead_trimmed = dead_length + counts.failed - redis.call('XLEN', dead)
  for name, number in pairs(counts) do
    if number > 0 then redis.call('HINCRBY', counters, name, number) end
  end
  return {counts.stored, counts.dead_trimmed}
end)

--   KEYS  as for bound_memory    ARGV[1]  its limits, as JSON
register('bound', SHRINKS, function(KEYS, ARGV)
  local length = redis.call('XLEN', KEYS[1])
  bound_memory(KEYS, cjson.decode(ARGV[1]))
  local trimmed = length - redis.call('XLEN', KEYS[1])
  if trimmed > 0 then redis.call('HINCRBY', KEYS[2], 'trimmed', trimmed) end
end)

--   KEYS[1]  feedmill:results, stream
--
-- Returns its bytes, and its number of entries.
register('measure_stream', READS, function(KEYS) return {bytes_of(KEYS[1]), redis.call('XLEN', KEYS[1])} end)

--   KEYS[1]  feedmill:counters, hash    KEYS[2]  feedmill:stored, table    ARGV[1]  ids, as JSON
--   ARGV[2]  key of the fingerprint of each
--
-- Returns each post's record, "" if there is none.
register('find', SHRINKS, function(KEYS, ARGV)
  local found, count = {}, 0
  for i, records in ipairs(records_of(KEYS[2], cjson.decode(ARGV[1]))) do
    local at, length = find_record(records, string.sub(ARGV[2], 16 * i - 15, 16 * i))
    found[i] = at and string.sub(records, at, at + length - 1) or ''
    if at then count = count + 1 end
  end
  -- pcall: a full Redis refuses it.
  if count > 0 then redis.pcall('HINCRBY', KEYS[1], 'answered', count) end
  return found
end)

--   KEYS[1]  feedmill:stored, table    ARGV[1]  the id
register('get', READS, function(KEYS, ARGV) return records_of(KEYS[1], {ARGV[1]})[1] end)

--   KEYS[1]  feedmill:stored, table    ARGV  id of a post, and the record of its score, of each
--
-- Returns the number of posts with results.
register('refresh', WRITES, function(KEYS, ARGV)
  local count = 0
  for i = 1, #ARGV, 2 do
    local score = ARGV[i + 1]
    local function replace(records)
      records, score = without(records, nil, SCORE) .. score, ''
      return records
    end
    if change(KEYS[1], ARGV[i], replace) or score == '' then count = count + 1 end
  end
  return count
end)
