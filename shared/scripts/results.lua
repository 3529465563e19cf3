-- The results store (shared/results.py): write a micro-batch, find results, and store scores.

-- Most milliseconds between two activities of a run that count as time in use. In longer pauses, the run waited for a
-- worker, or its sender for a person.
local MAX_PAUSE_MS = 60000
-- Maximum runs listed, the most recently active ones.
local MAX_RUNS = 1000

-- Add `counts` (field -> number) to a run's counters and its time in use, once per call and not per post.
--
-- ttl: seconds. first: true when posts are sent, because a run in which nothing is pending was not in use before.
local function count_progress(run, counts, ttl, first)
  local key, now = RUN .. run, math.floor(current_time() * 1000)
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
  redis.call('ZADD', RUNS, now, run)
  redis.call('EXPIRE', RUNS, math.ceil(ttl))
  redis.call('ZREMRANGEBYRANK', RUNS, 0, -1 - MAX_RUNS)
end

-- Bytes of a stream entry beside its texts; 30 to 180 were measured, most with a node per entry. Rounds of trimming.
local ENTRY_BYTES, ROUNDS = 200, 10

-- Return how many entries were ever added up to this one, and their bytes.
local function number_of(entry) return tonumber(by_name(entry[2]).number) or 0 end
local function total_of(entry) return entry and tonumber(by_name(entry[2]).total) or 0 end

local function newest_result() return redis.call('XREVRANGE', RESULTS_STREAM, '+', '-', 'COUNT', 1)[1] end

-- Return the bytes that the results stream takes. Purged entries count until they are the oldest ones.
local function stream_bytes()
  return total_of(newest_result()) - total_of(redis.call('XRANGE', RESULTS_STREAM, '-', '+', 'COUNT', 1)[1])
end

-- Trim the oldest entries of the results stream while it takes more than `limit` bytes. Return the bytes that it takes.
local function bound_stream(limit)
  local used = 0
  for _ = 1, ROUNDS do
    used = stream_bytes()
    if used <= limit then break end
    redis.call('XTRIM', RESULTS_STREAM, 'MAXLEN', math.floor(redis.call('XLEN', RESULTS_STREAM) * limit / used))
  end
  return used
end

-- Drop what exceeds the memory of results (the stream may take `limits.stream` bytes of it) and of sent records.
local function bound_memory(limits)
  local used = bound_stream(limits.stream)
  local dropped = {dropped = drop(STORED, limits.results - used), sent_dropped = drop(MARKS, limits.sent, SIZE)}
  for field, count in pairs(dropped) do
    if count > 0 then redis.call('HINCRBY', COUNTERS, field, count) end
  end
end

-- Maximum labels counted per hour, because applications can send any number of them; and seconds for which the counts
-- are kept: the longest period of `feedmill report`.
local MAX_LABELS_PER_HOUR, LABEL_COUNTS_TTL_S = 1000, 30 * 86400

-- Count new results by label in this hour. labels: label -> number.
local function count_labels(labels)
  local hour = LABELS .. math.floor(current_time() / 3600)
  for label, count in pairs(labels) do
    if redis.call('HLEN', hour) < MAX_LABELS_PER_HOUR or redis.call('HEXISTS', hour, label) == 1 then
      redis.call('HINCRBY', hour, label, count)
    end
  end
  redis.call('EXPIRE', hour, LABEL_COUNTS_TTL_S)
end

-- Return what identifies this server and its data (shared/results.py). A server keeps its run_id until it exits.
local run_id
local function identity()
  run_id = run_id or string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
  return run_id .. string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
end

register('identity', READS, identity)

--   ARGV[1]  the arguments of `_write_call` (shared/results.py), as JSON
--   ARGV[2]  the results' records, then those of their contexts
--   ARGV[3+] classification and post of each result; then the letter of each dead letter
--
-- Sets each result if absent, and appends new ones to the stream; skips purged posts, which a worker may have held.
-- Writes a dead letter unless the stream has one with its digest. Returns the server's identity, and the numbers of new
-- results and of trimmed dead letters.
register('write', WRITES, function(ARGV)
  local given, blob, at, server = cjson.decode(ARGV[1]), ARGV[2], 1, identity()
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
  local length, dead_length = redis.call('XLEN', RESULTS_STREAM), redis.call('XLEN', DEAD_LETTERS)
  if #ids > 0 then
    local purged, known, total = tombstones(ids), records_of(STORED, ids), total_of(newest_result())
    local before = tonumber(redis.call('HGET', COUNTERS, 'stored') or 0)
    local key = open(STORED, given.ttl, given.limits.results - given.limits.stream)
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
        changed[id], labels[label] = records .. record, (labels[label] or 0) + 1
        count(given.runs[i], 'stored')
        local number, sum = string.format('%d', before + counts.stored), string.format('%.0f', total)
        local entry = {'id', id, 'classification', text, 'post', post, 'number', number, 'total', sum}
        redis.call('XADD', RESULTS_STREAM, '*', unpack(entry))
      end
    end
    if counts.stored > 0 then
      for id, records in pairs(changed) do fields[#fields + 1], fields[#fields + 2] = id, records end
      for _, context in ipairs(given.contexts) do fields[#fields + 1], fields[#fields + 2] = context, next_record() end
      add(key, fields, given.ttl)
      count_labels(labels)
      redis.call('XTRIM', RESULTS_STREAM, 'MAXLEN', '~', given.length)
    end
  end
  for i, letter in ipairs(given.letters) do
    local id, digest, run = unpack(letter)
    local name = DEAD_LETTER .. digest
    local entry = redis.call('GET', name)
    if redis.call('EXISTS', TOMBSTONE .. id) == 1 then
      counts.gone = counts.gone + 1
    elseif not entry or #redis.call('XRANGE', DEAD_LETTERS, entry, entry) == 0 then
      local text = ARGV[2 + 2 * #ids + i]
      entry = redis.call('XADD', DEAD_LETTERS, 'MAXLEN', '~', given.dead_length, '*', 'id', id, 'letter', text)
      redis.call('SET', name, entry, 'EX', given.ttl)
      count(run, 'failed')
    end
  end
  for run, found in pairs(runs) do count_progress(run, found, given.run_ttl) end
  if counts.stored > 0 then bound_memory(given.limits) end
  counts.trimmed = length + counts.stored - redis.call('XLEN', RESULTS_STREAM)
  counts.dead_trimmed = dead_length + counts.failed - redis.call('XLEN', DEAD_LETTERS)
  for name, number in pairs(counts) do
    if number > 0 then redis.call('HINCRBY', COUNTERS, name, number) end
  end
  return {server, {counts.stored, counts.dead_trimmed}}
end)

--   ARGV[1]  see bound_memory, as JSON
register('bound', SHRINKS, function(ARGV)
  local length = redis.call('XLEN', RESULTS_STREAM)
  bound_memory(cjson.decode(ARGV[1]))
  local trimmed = length - redis.call('XLEN', RESULTS_STREAM)
  if trimmed > 0 then redis.call('HINCRBY', COUNTERS, 'trimmed', trimmed) end
end)

-- Returns bytes of results with their stream; their number; bytes of the stream; bytes and number of sent records.
register('measure', READS, function()
  local found = {}
  for _, name in ipairs({STORED, MARKS}) do
    local bytes, count = 0, 0
    for _, key in ipairs(generations(name, '-inf')) do
      bytes, count = bytes + memory_of(key), count + count_of(key, name == MARKS and SIZE)
    end
    found[#found + 1], found[#found + 2] = bytes, count
  end
  local stream = stream_bytes()
  return {found[1] + stream, found[2], stream, found[3], found[4]}
end)

--   ARGV[1]  ids, as JSON    ARGV[2]  key of the fingerprint of each
--
-- Returns the server's identity, then each post's record, "" if there is none.
register('find', SHRINKS, function(ARGV)
  local found, count = {identity()}, 0
  for i, records in ipairs(records_of(STORED, cjson.decode(ARGV[1]))) do
    local at, length = find_record(records, string.sub(ARGV[2], 16 * i - 15, 16 * i))
    found[i + 1] = at and string.sub(records, at, at + length - 1) or ''
    if at then count = count + 1 end
  end
  -- pcall: a full Redis refuses it.
  if count > 0 then redis.pcall('HINCRBY', COUNTERS, 'answered', count) end
  return found
end)

--   ARGV[1]  the id
register('get', READS, function(ARGV) return records_of(STORED, {ARGV[1]})[1] end)

--   ARGV  id of a post, and the record of its score, of each
--
-- Returns the number of posts with results.
register('refresh', WRITES, function(ARGV)
  local count = 0
  for i = 1, #ARGV, 2 do
    local score = ARGV[i + 1]
    local function replace(records)
      records, score = without(records, SCORE_KEY) .. score, ''
      return records
    end
    if change(STORED, ARGV[i], replace) or score == '' then count = count + 1 end
  end
  return count
end)
