-- The results store (shared/results.py): write a micro-batch, find results, and store scores.

-- Most milliseconds between two activities of a run that count as time in use. In longer pauses, the run waited for a
-- worker, or its sender for a person.
local MAX_PAUSE_MS = 60000
-- Maximum runs listed, the most recently active ones; and runs to look at in a call that removes some.
local MAX_RUNS, RUNS_LOOKED_AT = 1000, 2000
-- Bytes of a run's name and of its columns, at most.
local MAX_RUN_BYTES, MAX_COLUMNS_BYTES = 400, 65536
-- Fields of a run's progress, all counts.
local PROGRESS = {'sent', 'stored', 'failed', 'began', 'latest', 'used'}

-- Return the runs in a part of the list that are none: without progress, or with a name that is too long.
local function ghosts_in(first, last)
  local ghosts = {}
  for _, run in ipairs(redis.call('ZRANGE', RUNS, first, last)) do
    if #run > MAX_RUN_BYTES or redis.call('EXISTS', RUN .. run) == 0 then ghosts[#ghosts + 1] = run end
  end
  return ghosts
end

-- Remove what exceeds MAX_RUNS: names that are not runs, then runs that were last active in the future, then the runs
-- that were active least recently. Producers may list anything as a run. now: milliseconds since 1970.
local function bound_runs(now)
  local count = redis.call('ZCARD', RUNS)
  if count <= MAX_RUNS then return end
  local excess, removed = count - MAX_RUNS, 0
  for first = 0, math.min(count, RUNS_LOOKED_AT) - 1, 50 do
    local ghosts = ghosts_in(first - removed, first - removed + 49)
    for i = 1, math.min(#ghosts, excess - removed) do removed = removed + redis.call('ZREM', RUNS, ghosts[i]) end
    if removed == excess then return end
  end
  if removed > 0 and count > RUNS_LOOKED_AT then return end -- the next call finds more
  excess = excess - removed
  local ahead = math.min(excess, #redis.call('ZREVRANGEBYSCORE', RUNS, '+inf', '(' .. now, 'LIMIT', 0, excess))
  if ahead > 0 then redis.call('ZREMRANGEBYRANK', RUNS, -ahead, -1) end
  if excess > ahead then redis.call('ZREMRANGEBYRANK', RUNS, 0, excess - ahead - 1) end
end

-- Add `counts` (field -> number) to a run's counters and its time in use, once per call and not per post.
--
-- ttl: seconds. first: true when posts are sent, because a run in which nothing is pending was not in use before.
local function count_progress(run, counts, ttl, first)
  local key, now = RUN .. run, math.floor(current_time() * 1000)
  local values, known, changed = try('HMGET', key, unpack(PROGRESS)), {}, {}
  if not values and not delete(key) then return end
  for i, field in ipairs(PROGRESS) do known[field] = count_in(values and values[i]) end
  local function set(field, count)
    changed[#changed + 1], changed[#changed + 2] = field, string.format('%d', count)
  end
  for field, count in pairs(counts) do set(field, known[field] + count) end
  if known.began == 0 then set('began', now) end
  local pause = now - known.latest
  if pause > 0 and pause <= MAX_PAUSE_MS and not (first and known.stored + known.failed >= known.sent) then
    set('used', known.used + pause)
  end
  set('latest', now)
  redis.call('HSET', key, unpack(changed))
  redis.call('EXPIRE', key, math.ceil(ttl))
  now = string.format('%d', now)
  if not try('ZADD', RUNS, now, run) then
    if not delete(RUNS) then return end
    redis.call('ZADD', RUNS, now, run)
  end
  redis.call('EXPIRE', RUNS, math.ceil(ttl))
  pcall(bound_runs, now) -- counts are written, whether or not a user may list runs
end

-- Subtract from a run's counter, down to 0 at most. run: "" for none.
local function uncount(run, field, number)
  local count = run ~= '' and count_in(try('HGET', RUN .. run, field)) or 0
  if count > 0 then redis.call('HSET', RUN .. run, field, string.format('%d', math.max(0, count - number))) end
end

-- Add a run's progress to a flat list: its name, the fields of PROGRESS, and its columns. Values that are too long
-- become "". Return whether there is such a run.
local function add_progress(found, run)
  local values = #run <= MAX_RUN_BYTES and try('HMGET', RUN .. run, 'columns', unpack(PROGRESS))
  if not values then return false end
  local columns, is_run = table.remove(values, 1), false
  for i, value in ipairs(values) do
    is_run = is_run or value ~= false
    values[i] = value and #value <= 18 and value or ''
  end
  if not (is_run or columns) then return false end
  found[#found + 1] = run
  for _, value in ipairs(values) do found[#found + 1] = value end
  found[#found + 1] = columns and #columns <= MAX_COLUMNS_BYTES and columns or ''
  return true
end

--   ARGV  names of runs
--
-- Returns what `add_progress` adds for each one that there is.
register('progress', READS, function(ARGV)
  local found = {}
  for _, run in ipairs(ARGV) do add_progress(found, run) end
  return found
end)

--   ARGV[1]  maximum runs
--
-- Returns the progress of the runs that were active most recently. What was active in the future comes last: producers
-- may write anything there, and Redis' clock can be set back.
register('recent', READS, function(ARGV)
  local now, found, count = string.format('%d', current_time() * 1000), {}, 0
  for _, range in ipairs({{now, '-inf'}, {'+inf', '(' .. now}}) do
    for first = 0, RUNS_LOOKED_AT - 1, 50 do
      local names = try('ZREVRANGEBYSCORE', RUNS, range[1], range[2], 'LIMIT', first, 50) or {}
      for _, run in ipairs(names) do
        if count >= tonumber(ARGV[1]) then return found end
        if add_progress(found, run) then count = count + 1 end
      end
      if #names < 50 then break end
    end
  end
  return found
end)

-- Return the strings in a JSON array; none if the text is not one.
local function strings_in(text)
  local strings = {}
  for _, value in ipairs(decoded(text)) do
    if type(value) == 'string' then strings[#strings + 1] = value end
  end
  return strings
end

--   ARGV[1]  the run    ARGV[2]  columns, as a JSON array    ARGV[3]  ttl, seconds
--
-- Adds columns to those that the run's posts carry: each of its files may have others.
register('keep_columns', WRITES, function(ARGV)
  local key, columns, known = RUN .. ARGV[1], {}, {}
  local values = try('HMGET', key, 'columns')
  if not values and not delete(key) then return end
  local before = values and values[1] or ''
  before = #before <= MAX_COLUMNS_BYTES and before or ''
  for _, text in ipairs({before, ARGV[2]}) do
    for _, column in ipairs(strings_in(text)) do
      if not known[column] then columns[#columns + 1], known[column] = column, true end
    end
  end
  local text = #columns > 0 and cjson.encode(columns) or '[]'
  redis.call('HSET', key, 'columns', #text <= MAX_COLUMNS_BYTES and text or ARGV[2])
  redis.call('EXPIRE', key, ARGV[3])
end)

--   ARGV[1]  the run    ARGV[2]  labels with their descriptions, as JSON    ARGV[3]  ttl, seconds
register('keep_labels', WRITES, function(ARGV)
  local key = RUN .. ARGV[1]
  if not try('HMGET', key, 'labels') and not delete(key) then return end
  redis.call('HSET', key, 'labels', ARGV[2])
  redis.call('EXPIRE', key, ARGV[3])
end)

--   ARGV[1]  the run    ARGV[2]  maximum bytes
--
-- Returns the text that `keep_labels` stored; "" if there is none, or if it is longer.
register('kept_labels', READS, function(ARGV)
  local text = try('HGET', RUN .. ARGV[1], 'labels')
  return text and #text <= tonumber(ARGV[2]) and text or ''
end)

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
  local dropped = {
    dropped = drop(STORED, limits.results - used, count_results), sent_dropped = drop(MARKS, limits.sent, count_marks),
  }
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

-- Return whether one of these posts was purged.
local function any_purged(ids)
  for _, tombstone in ipairs(tombstones(ids)) do
    if tombstone then return true end
  end
  return false
end

-- Return the entry of a dead letter that the stream has; nil if it has none with its digest.
local function entry_of(digest)
  local name = redis.call('GET', DEAD_LETTER .. digest)
  return name and redis.call('XRANGE', DEAD_LETTERS, name, name)[1]
end

-- Write a dead letter. An earlier one of the same request goes if it has another reason: the latest failure counts.
--
-- letter: id, digest, run, reason, and the ids in its text if it has no post. text: the letter. bare: the letter
-- without its text, for a purged post in it. given: the arguments of `write`. counts, count: see `write`.
local function write_letter(letter, text, bare, given, counts, count)
  local id, digest, run, reason, mentions = unpack(letter)
  if redis.call('EXISTS', TOMBSTONE .. id) == 1 then
    counts.gone = counts.gone + 1
    return
  end
  local entry = entry_of(digest)
  if entry and decoded(by_name(entry[2]).letter).reason == reason then return end
  if any_purged(mentions) then text, mentions = bare, {} end
  local fields = {'id', id, 'letter', text}
  if #mentions > 0 then fields[5], fields[6] = 'mentions', cjson.encode(mentions) end
  local name = redis.call('XADD', DEAD_LETTERS, 'MAXLEN', '~', given.dead_length, '*', unpack(fields))
  redis.call('SET', DEAD_LETTER .. digest, name, 'EX', given.ttl)
  if entry then
    redis.call('XDEL', DEAD_LETTERS, entry[1])
  else
    count(run, 'failed')
  end
end

--   ARGV[1]  the arguments of `_write_call` (shared/results.py), as JSON
--   ARGV[2]  the results' records, then those of their contexts
--   ARGV[3+] classification and post of each result; then each dead letter, and the same without its text
--
-- Sets each result if absent, and appends new ones to the stream; skips purged posts, which a worker may have held.
-- Writes a dead letter unless the stream has one with its digest and reason. Returns the server's identity, and the
-- numbers of new results and of trimmed dead letters.
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
      fields[#fields + 1], fields[#fields + 2] = TALLY, tally_of(count_results(key) + counts.stored)
      add(key, fields, given.ttl)
      count_labels(labels)
      redis.call('XTRIM', RESULTS_STREAM, 'MAXLEN', '~', given.length)
    end
  end
  for i, letter in ipairs(given.letters) do
    write_letter(letter, ARGV[1 + 2 * #ids + 2 * i], ARGV[2 + 2 * #ids + 2 * i], given, counts, count)
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

-- Returns bytes of results with their stream; their number; bytes of the stream; bytes and estimated number of sent
-- records.
register('measure', READS, function()
  local found = {}
  for _, name in ipairs({STORED, MARKS}) do
    local bytes, count = 0, 0
    for _, key in ipairs(generations(name, '-inf')) do
      bytes, count = bytes + memory_of(key), count + (name == MARKS and count_marks or count_results)(key)
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
