-- Tables: records of posts, kept for a time and within a bound of memory.
--
-- A table's key, a sorted set, lists its generations, scored by when they end. A generation is a hash: post id -> the
-- post's records, one after another. It is written for an eighth of the table's time to live, or until it takes an
-- eighth of the bound. So no record carries a time, and nothing searches for old ones: a generation that has ended, or
-- the oldest ones of a table above its bound, are dropped whole.
--
-- Producers may write the keys of sent records: whatever stands there, no function fails for good or loops.

-- A generation's share of the time to live and of the bound; most generations; entries that MEMORY USAGE samples.
local PARTS, MAX_GENERATIONS, SAMPLES = 8, 64, 20
-- Arguments per Redis command. Lua fails above 7,999.
local ARGUMENTS = 1000

-- Redis runs functions with these permissions: only read, also on a full Redis and on replicas; write, also on a full
-- Redis, because they free memory or need little; write, unless Redis is full.
local READS, SHRINKS, WRITES = {'no-writes'}, {'allow-oom'}, {}

-- Register a function of the arguments after its name.
local function register(name, flags, callback)
  redis.register_function{
    function_name = NAME .. name, flags = flags, callback = function(_, args) return callback(args) end,
  }
end

-- Return the time in seconds since 1970.
local function current_time()
  local time = redis.call('TIME')
  return time[1] + time[2] / 1000000
end

-- Return an object from a flat list of names and values.
local function by_name(flat)
  local named = {}
  for i = 1, #flat, 2 do named[flat[i]] = flat[i + 1] end
  return named
end

-- Return a command's answer; nil if its key has another type.
local function try(...)
  local answer = redis.pcall(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  if not string.find(answer.err, 'WRONGTYPE', 1, true) then error(answer) end
end

-- Call a command with its first arguments and some of the others at a time. Return its answers, joined.
local function in_parts(others, ...)
  local answers, first = {}, {...}
  local fixed = #first
  for start = 1, #others, ARGUMENTS do
    for i = fixed + 1, fixed + ARGUMENTS do first[i] = others[start + i - fixed - 1] end
    local answer = try(unpack(first, 1, math.min(fixed + ARGUMENTS, fixed + #others - start + 1)))
    if type(answer) == 'table' and not answer.ok then
      for i, value in ipairs(answer) do answers[start + i - 1] = value end
    end
  end
  return answers
end

-- Return the tombstone of each id, or false.
local function tombstones(ids)
  local keys = {}
  for i, id in ipairs(ids) do keys[i] = TOMBSTONE .. id end
  return in_parts(keys, 'MGET')
end

-- Return the keys of a table's generations, newest first. ends: the time, or '-inf' for those that have ended as well.
local function generations(name, ends)
  local keys = try('ZREVRANGEBYSCORE', name, '+inf', ends or current_time(), 'LIMIT', 0, MAX_GENERATIONS) or {}
  for i, generation in ipairs(keys) do keys[i] = name .. ':' .. generation end
  return keys
end

-- Return the records of each id, those in the newest generation first.
local function records_of(name, ids)
  local found = {}
  for i = 1, #ids do found[i] = '' end
  for _, key in ipairs(generations(name)) do
    for i, records in ipairs(in_parts(ids, 'HMGET', key)) do
      if records then found[i] = found[i] .. records end
    end
  end
  return found
end

local function memory_of(key) return redis.call('MEMORY', 'USAGE', key, 'SAMPLES', SAMPLES) or 0 end

local function remove(name, generation)
  redis.call('UNLINK', name .. ':' .. generation)
  redis.call('ZREM', name, generation)
end

-- Return the key of the generation to which records are added. ttl: seconds. limit: bytes of the table.
local function open(name, ttl, limit)
  local time, period = current_time(), ttl / PARTS
  local count = try('ZCARD', name)
  if not count then
    redis.call('DEL', name)
  elseif count > MAX_GENERATIONS then -- another producer has a much lower bound, or has written anything
    redis.call('ZREMRANGEBYSCORE', name, time + ttl + period, '+inf')
    for _, generation in ipairs(redis.call('ZRANGE', name, 0, -1 - MAX_GENERATIONS)) do remove(name, generation) end
  end
  local found = redis.call('ZREVRANGEBYSCORE', name, time + ttl + period, time + ttl, 'LIMIT', 0, 1)
  local key = found[1] and name .. ':' .. found[1]
  if key and try('HGET', key, '') == nil then redis.call('DEL', key) end
  if not key or memory_of(key) >= limit / PARTS then
    local generation, seconds = string.format('%.6f', time), math.ceil(ttl + period)
    key = name .. ':' .. generation
    redis.call('ZADD', name, time + ttl + period, generation)
    redis.call('EXPIRE', name, seconds, 'NX')
    redis.call('EXPIRE', name, seconds, 'GT')
  end
  return key
end

-- Add to a generation. fields: ids and their records, alternating. Its key expires later than the generation ends,
-- because Redis frees an expired key at once, and a dropped one in the background.
local function add(key, fields, ttl)
  if #fields == 0 then return end
  in_parts(fields, 'HSET', key)
  redis.call('EXPIRE', key, math.ceil(ttl * (1 + 2 / PARTS)), 'NX')
end

-- Return the number of a generation's fields; or an estimate of its records, if each has `size` bytes.
local function count_of(key, size)
  local fields = try('HLEN', key) or 0
  local sample, bytes = size and fields > 0 and redis.call('HSCAN', key, 0, 'COUNT', 100)[2] or {}, 0
  if #sample == 0 then return fields end
  for i = 2, #sample, 2 do bytes = bytes + #sample[i] end
  return math.floor(fields * bytes / size / (#sample / 2) + 0.5)
end

-- Drop the generations that have ended, and the oldest ones while all take more than `limit` bytes. Return the number
-- of records in the latter (see count_of).
local function drop(name, limit, size)
  local time, used, dropped = current_time(), 0, 0
  local listed = try('ZREVRANGE', name, 0, -1, 'WITHSCORES') or {}
  for i = 1, #listed, 2 do
    local key, ends = name .. ':' .. listed[i], tonumber(listed[i + 1])
    used = used + memory_of(key)
    if ends <= time or used > limit then
      if ends > time then dropped = dropped + count_of(key, size) end
      remove(name, listed[i])
    end
  end
  return dropped
end

-- Replace an id's records in each generation, newest first, by what `edit` returns. Return whether any changed.
local function change(name, id, edit)
  local changed = false
  for _, key in ipairs(generations(name, '-inf')) do
    local records = try('HGET', key, id)
    local left = records and edit(records)
    if left and left ~= records then
      if left == '' then redis.call('HDEL', key, id) else redis.call('HSET', key, id, left) end
      changed = true
    end
  end
  return changed
end

-- Results: a record of the table feedmill:stored starts with its length, its kind, and the key of its fingerprint
-- (shared/results.py).

local HEAD = 21
-- Stands for the key of a fingerprint in the record of a score.
local SCORE_KEY = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'

-- Return the offset of the record with this key.
local function find_record(records, key)
  local at = 1
  while at <= #records do
    local length, _, held = struct.unpack('>I4Bc16', records, at)
    if held == key then return at, length end
    at = at + length
  end
end

-- Return an id's records without those of a key.
local function without(records, key)
  local at, length = find_record(records, key)
  while at do
    records = string.sub(records, 1, at - 1) .. string.sub(records, at + length)
    at, length = find_record(records, key)
  end
  return records
end

-- Return the text of an id's latest score, as JSON, or nil.
local function score_in(records)
  local at, length = find_record(records, SCORE_KEY)
  return at and string.sub(records, at + HEAD, at + length - 1)
end

local function unhex(text)
  return (string.gsub(text, '..', function(byte) return string.char(tonumber(byte, 16)) end))
end

-- Return a fingerprint's key.
local function key_of(fingerprint)
  local is_hex = #fingerprint == 32 and not string.find(fingerprint, '%X')
  return unhex(is_hex and fingerprint or string.sub(redis.sha1hex(fingerprint), 1, 32))
end

-- Delete an id's result with this fingerprint, and the score beside it if the generation holds no other result of the
-- id. Without a fingerprint, delete all of its records. Return whether there were any.
local function forget_results(id, fingerprint)
  return change(STORED, id, function(records)
    local left = fingerprint and without(records, key_of(fingerprint)) or ''
    return without(left, SCORE_KEY) == '' and '' or left
  end)
end

-- Sent records: a mark is a digest of an id, one of a run, and one of what was sent (producers/push.py). A post's own
-- field would take five times as much, so marks of several posts share one of the generation's 65,536 fields, a bucket.

local BUCKET, ID, RUN_BYTES, SIZE = 2, 4, 2, 12
-- Most marks of a bucket, which an id in thousands of runs can reach; the oldest ones go.
local MAX_MARKS = 4096

local function digest_of(text, size) return unhex(string.sub(redis.sha1hex(text), 1, 2 * size)) end

-- Return the bucket of an id, and the start of its marks.
local function bucket_of(id)
  local digest = digest_of(id, BUCKET + ID)
  return string.sub(digest, 1, BUCKET), string.sub(digest, BUCKET + 1)
end

-- Return the offset of the first mark that starts with these bytes.
local function find_mark(marks, start)
  local at = string.find(marks, start, 1, true)
  while at and (at - 1) % SIZE > 0 do at = string.find(marks, start, at + 1, true) end
  return at
end

-- Delete the marks in a bucket that start with these bytes. Return whether there were any.
local function forget_marks(bucket, start)
  return change(MARKS, bucket, function(marks)
    local at = find_mark(marks, start)
    while at do
      marks = string.sub(marks, 1, at - 1) .. string.sub(marks, at + SIZE)
      at = find_mark(marks, start)
    end
    return marks
  end)
end
