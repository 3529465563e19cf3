-- Tables: records of posts, kept for a time and within a bound of memory.
--
-- A table's key, a sorted set, lists its generations, scored by when they end. A generation is a hash: post id -> the
-- post's records, one after another. It is written for an eighth of the table's time to live, or until it takes an
-- eighth of the bound. So no record carries a time, and nothing searches for old ones: a generation that has ended, or
-- the oldest ones of a table above its bound, are dropped whole.
--
-- Producers may write the keys of sent records and of runs. Whatever stands there, no function fails after its first
-- write, fails for good, or loops: what is not valid counts as absent.

-- A generation's share of the time to live and of the bound; most generations; entries that MEMORY USAGE samples.
local PARTS, MAX_GENERATIONS, SAMPLES = 8, 64, 20
-- Arguments per Redis command. Lua fails above 7,999.
local ARGUMENTS = 1000

-- Redis runs functions with these permissions: only read, also on a full Redis and on replicas; write, also on a full
-- Redis, because they free memory or need little; write, unless Redis is full.
local READS, SHRINKS, WRITES = {'no-writes'}, {'allow-oom'}, {}

-- Register a function of the arguments after its name, and of the keys that its caller declares.
local function register(name, flags, callback)
  redis.register_function{
    function_name = NAME .. name, flags = flags, callback = function(keys, args) return callback(args, keys) end,
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

-- Decode an object of JSON; return an empty one if it is invalid.
local function decoded(text)
  local valid, value = pcall(cjson.decode, text or '')
  return valid and type(value) == 'table' and value or {}
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

-- Return a count from a hash's field; 0 if it is absent or anything else. Numbers are exact up to 15 digits.
local function count_in(text)
  return text and #text <= 15 and string.find(text, '^%d+$') and tonumber(text) or 0
end

-- Delete a key. Return whether that is permitted: producers may not delete all that they may write.
local function delete(key) return type(redis.pcall('DEL', key)) == 'number' end

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

-- Return the records of each id, those in the newest generation first. valid: returns what is valid of them in one
-- generation; nil if only workers write them.
local function records_of(name, ids, valid)
  local found = {}
  for i = 1, #ids do found[i] = '' end
  for _, key in ipairs(generations(name)) do
    for i, records in ipairs(in_parts(ids, 'HMGET', key)) do
      if records then found[i] = found[i] .. (valid and valid(records) or records) end
    end
  end
  return found
end

local function memory_of(key) return redis.call('MEMORY', 'USAGE', key, 'SAMPLES', SAMPLES) or 0 end

local function remove(name, generation)
  redis.call('UNLINK', name .. ':' .. generation)
  redis.call('ZREM', name, generation)
end

-- Drop a table that is not one, and the oldest generations of more than MAX_GENERATIONS: another producer has a much
-- lower bound, or has written anything. Functions search no more, and records that they do not find must not appear
-- again later. latest: when generations end at the latest; nil for any time.
local function bound_generations(name, latest)
  local count = try('ZCARD', name)
  if not count then
    redis.call('DEL', name)
    return
  end
  if count > MAX_GENERATIONS and latest then count = count - redis.call('ZREMRANGEBYSCORE', name, latest, '+inf') end
  local unlinks = true
  while count > MAX_GENERATIONS do
    local oldest = redis.call('ZRANGE', name, 0, math.min(count - MAX_GENERATIONS, ARGUMENTS) - 1)
    -- Not the keys of thousands, most of which do not exist.
    for _, generation in ipairs(unlinks and oldest or {}) do redis.call('UNLINK', name .. ':' .. generation) end
    unlinks = false
    in_parts(oldest, 'ZREM', name)
    count = count - #oldest
  end
end

-- Return the key of the generation to which records are added. ttl: seconds. limit: bytes of the table.
local function open(name, ttl, limit)
  local time, period = current_time(), ttl / PARTS
  bound_generations(name, time + ttl + period)
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

-- Drop the generations that have ended, and the oldest ones while all take more than `limit` bytes. Return the number
-- of records in the latter. count: returns that of a generation.
local function drop(name, limit, count)
  bound_generations(name)
  local time, used, dropped = current_time(), 0, 0
  local listed = try('ZREVRANGE', name, 0, -1, 'WITHSCORES') or {}
  for i = 1, #listed, 2 do
    local key, ends = name .. ':' .. listed[i], tonumber(listed[i + 1])
    used = used + memory_of(key)
    if ends <= time or used > limit then
      if ends > time then dropped = dropped + count(key) end
      remove(name, listed[i])
    end
  end
  return dropped
end

-- Replace an id's records in each generation, newest first, by what `edit` returns for them and the generation's key.
-- Return whether any changed.
local function change(name, id, edit)
  local changed = false
  for _, key in ipairs(generations(name, '-inf')) do
    local records = try('HGET', key, id)
    local left = records and edit(records, key)
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
-- Kinds of records: up to this one, results; and what an id does not have.
local LAST_RESULT, CONTEXT = 1, 3
-- Name and key of the record that holds the number of a generation's results. Ids do not start with a space.
local TALLY, TALLY_KEY = ' results', '\255\255\255\255\255\255\255\255\255\255\255\255\255\255\255\255'
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

-- Return the number of results in an id's records, of which others are scores.
local function results_in(records)
  local at, count = 1, 0
  while at <= #records do
    local length, kind = struct.unpack('>I4B', records, at)
    if kind <= LAST_RESULT then count = count + 1 end
    at = at + length
  end
  return count
end

-- Return the number of a generation's results. Its fields are fewer or more: an id can have several results, and
-- results share contexts.
local function count_results(key)
  local tally = try('HGET', key, TALLY)
  return tally and tonumber(string.sub(tally, HEAD + 1)) or 0
end

-- Return the record of a number of results.
local function tally_of(count)
  local text = string.format('%d', count)
  return struct.pack('>I4Bc16', HEAD + #text, CONTEXT, TALLY_KEY) .. text
end

-- Delete an id's result with this fingerprint, and the score beside it if the generation holds no other result of the
-- id. Without a fingerprint, delete all of its records. Return the number of deleted results.
local function forget_results(id, fingerprint)
  local deleted = 0
  change(STORED, id, function(records, key)
    local left = fingerprint and without(records, key_of(fingerprint)) or ''
    local fewer = results_in(records) - results_in(left)
    if fewer > 0 then redis.call('HSET', key, TALLY, tally_of(math.max(0, count_results(key) - fewer))) end
    deleted = deleted + fewer
    return without(left, SCORE_KEY) == '' and '' or left
  end)
  return deleted
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

-- Return the estimated number of a generation's marks, from a sample of its buckets.
local function count_marks(key)
  local buckets = try('HLEN', key) or 0
  local sample, bytes = buckets > 0 and redis.call('HSCAN', key, 0, 'COUNT', 100)[2] or {}, 0
  if #sample == 0 then return buckets end
  for i = 2, #sample, 2 do bytes = bytes + #sample[i] end
  return math.floor(buckets * bytes / SIZE / (#sample / 2) + 0.5)
end

-- Return the offset of the first mark that starts with these bytes.
local function find_mark(marks, start)
  local at = string.find(marks, start, 1, true)
  while at and (at - 1) % SIZE > 0 do at = string.find(marks, start, at + 1, true) end
  return at
end

-- Return a bucket's marks; none if producers have written something else there.
local function valid_marks(marks)
  return #marks % SIZE == 0 and #marks <= SIZE * MAX_MARKS and marks or ''
end

-- Delete the marks in a bucket that start with these bytes. Return whether there were any.
local function forget_marks(bucket, start)
  return change(MARKS, bucket, function(marks)
    local at = find_mark(valid_marks(marks), start)
    while at do
      marks = string.sub(marks, 1, at - 1) .. string.sub(marks, at + SIZE)
      at = find_mark(marks, start)
    end
    return marks
  end)
end
