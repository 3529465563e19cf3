"""Parts of other scripts: keep small records of posts in few keys, because a key of its own costs over 100 bytes.

A table's records are in buckets: strings with the records of several ids one after another. A record starts with a
checksum of its id, which determines its bucket. The table grows by linear hashing: when the next bucket in turn is
large enough, half of its records move to a new bucket. So the mean size of a bucket does not depend on the number of
records, and an id's records are always in one bucket. The table's key holds its number of buckets.

Records carry the time when they expire, and leave their bucket with the next write to it. The key of a bucket expires
after its last record. Records of results: shared/result_records.py. Records of sent posts: marks.
"""

from zlib import crc32

#: Bytes of an id's checksum in records: CRC-32, which takes Python a fourth of SHA-1's time, and can be written in Lua.
ID_BYTES = 4
#: Buckets of a new table; a power of two.
MIN_BUCKETS = 16
#: Kinds of records of results: a packed result, a result as JSON, and a post's score on its site, as JSON.
PACKED, JSON, SCORE = range(3)
#: Arguments per Redis command of a script. Lua fails above 7,999.
ARGUMENTS = 1000
#: Most buckets that are believed in: the number is a text that producers may write, and scripts loop up to it.
MAX_BUCKETS = 2**24

#: Functions of Lua on the buckets of a table, whose key is `name`.
BUCKETS = f"""
local find, sub, read = string.find, string.sub, struct.unpack
-- Return the values that MGET or HMGET finds. key: the hash of HMGET.
local function values_of(command, names, key)
  local found, total = {{}}, #names
  for start = 1, total, {ARGUMENTS} do
    local last, part = math.min(start + {ARGUMENTS - 1}, total), nil
    if key then
      part = redis.call(command, key, unpack(names, start, last))
    else
      part = redis.call(command, unpack(names, start, last))
    end
    if total <= {ARGUMENTS} then return part end
    for i, value in ipairs(part) do found[start + i - 1] = value end
  end
  return found
end
-- Return the number of buckets; 0 for a new table. Producers may have written no number, an infinite one or a fraction.
local function size_of(name)
  local count = tonumber(redis.call('GET', name) or 0)
  return count and count >= {MIN_BUCKETS} and count <= {MAX_BUCKETS} and count % 1 == 0 and count or 0
end
-- Return the number of buckets, and the largest power of two that is not above it.
local function buckets_of(name)
  local count, half = math.max(size_of(name), {MIN_BUCKETS}), {MIN_BUCKETS}
  while 2 * half <= count do half = 2 * half end
  return count, half
end
-- Return the key of the bucket of the record, or checksum, that starts at an offset of a text.
local function bucket_at(name, text, offset, count, half)
  local at = read('>I4', text, offset) % (2 * half)
  if at >= count then at = at - half end
  return name .. ':' .. at
end
-- Return the checksum of an id: CRC-32.
local function checksum_of(id)
  local sum = -1
  for i = 1, #id do
    sum = bit.bxor(sum, string.byte(id, i))
    for _ = 1, 8 do sum = bit.bxor(bit.rshift(sum, 1), bit.band(-bit.band(sum, 1), 0xEDB88320)) end
  end
  return struct.pack('>I4', bit.bnot(sum) % 4294967296)
end
-- Return the bucket of an id: its key, its records, and the id's checksum.
local function bucket_of(name, id)
  local checksum = checksum_of(id)
  local key = bucket_at(name, checksum, 1, buckets_of(name))
  return key, redis.call('GET', key) or '', checksum
end
-- Return the numbers of those ids, from 1, of which a key with this prefix exists; nil if there are none.
local function existing(prefix, ids)
  local keys, found, count = {{}}, {{}}, 0
  for i, id in ipairs(ids) do keys[i] = prefix .. id end
  for start = 1, #keys, {ARGUMENTS} do
    count = count + redis.call('EXISTS', unpack(keys, start, math.min(start + {ARGUMENTS - 1}, #keys)))
  end
  if count == 0 then return nil end
  for i, key in ipairs(keys) do found[i] = redis.call('EXISTS', key) == 1 end
  return found
end
-- Store what is left of a bucket.
local function shrink_bucket(key, records)
  if #records > 0 then redis.call('SET', key, records, 'KEEPTTL') else redis.call('DEL', key) end
end
-- Split buckets until the next one in turn has fewer bytes than `bytes`, but at most `limit` of them.
-- size: bytes of each record; nil if they are in the four bytes after the checksum. ttl: seconds.
local function split_buckets(name, limit, bytes, size, ttl)
  local count, half = buckets_of(name)
  local before = count
  while count - before < limit and count < {MAX_BUCKETS} do
    local source, target = name .. ':' .. (count - half), name .. ':' .. count
    local records = redis.call('GET', source)
    if not records or #records < bytes or size and #records % size > 0 then break end
    -- Runs of records with the same target are moved together.
    local parts, at, start, run = {{{{}}, {{}}}}, 1, 1, nil
    while at <= #records do
      local sum, length = read('>I4I4', records, at)
      local into = sum % (2 * half) == count and 2 or 1
      if into ~= run then
        if run then table.insert(parts[run], sub(records, start, at - 1)) end
        run, start = into, at
      end
      at = at + (size or length)
    end
    table.insert(parts[run], sub(records, start))
    if #parts[2] > 0 then
      redis.call('SET', target, table.concat(parts[2]), 'EX', ttl)
      if #parts[1] > 0 then
        redis.call('SET', source, table.concat(parts[1]), 'EX', ttl)
      else
        redis.call('DEL', source)
      end
    end
    count = count + 1
    if count == 2 * half then half = count end
  end
  redis.call('SET', name, count, 'EX', ttl)
end
"""
#: Bytes of a bucket above which it is split. With records of 100 bytes, the mean is about twelve in a growing table,
#: and falls to four in one that drops as much as it gets. More would save memory, but a new result rewrites its bucket.
SPLIT_BYTES = 512

#: Functions on records of results (shared/result_records.py).
RECORDS = (
    BUCKETS
    + f"""
local SCORE = {SCORE}
local function length_at(records, at) return read('>I4', records, at + 4) end
local function kind_at(records, at) return string.byte(records, at + 8) end
local function expires_at(records, at) return read('>I4', records, at + length_at(records, at) - 4) end
local function id_at(records, at) return sub(records, at + 27, at + 26 + read('>I2', records, at + 25)) end
-- Return the offset of the record with this checksum of the id and this key of the fingerprint.
local function find_record(records, checksum, key)
  local at = find(records, key, 1, true)
  while at do
    local start = at - 9
    if start > 0 and sub(records, start, start + 3) == checksum then return start end
    at = find(records, key, at + 1, true)
  end
end
local function without_record(records, at)
  return sub(records, 1, at - 1) .. sub(records, at + length_at(records, at))
end
-- Return the offsets of an id's records: of its results, and of its score.
local function records_of(records, id)
  local at, results, score = 1, {{}}, nil
  while at <= #records do
    if id_at(records, at) == id then
      if kind_at(records, at) == SCORE then score = at else results[#results + 1] = at end
    end
    at = at + length_at(records, at)
  end
  return results, score
end
-- Return a fingerprint's key.
local function key_of(fingerprint)
  local hex = fingerprint
  if #hex ~= 32 or find(hex, '%X') then hex = sub(redis.sha1hex(fingerprint), 1, 32) end
  return (string.gsub(hex, '..', function(byte) return string.char(tonumber(byte, 16)) end))
end
"""
)
#: Defines `forget_result`, which deletes a result by fingerprint, and the score of an id without further results.
#: stored: feedmill:stored, string, and its buckets.
FORGET_RESULT = (
    RECORDS
    + """
local function forget_result(stored, id, fingerprint)
  local key, records, checksum = bucket_of(stored, id)
  local at = find_record(records, checksum, key_of(fingerprint))
  if at then
    records = without_record(records, at)
    local results, score = records_of(records, id)
    if #results == 0 and score then records = without_record(records, score) end
    shrink_bucket(key, records)
  end
end
"""
)
#: Bytes of a mark: a checksum of the id (`ID_BYTES`), one of the run, a digest of what was sent, and the hour when it
#: expires. The probability that a new post is taken for sent is 2**-48 (4e-15) for each mark of its id, and 2**-80 for
#: each mark of another id, together 1e-16 at 100 million marks.
RUN_BYTES, DIGEST_BYTES, HOUR_BYTES = 2, 6, 2
MARK_BYTES = ID_BYTES + RUN_BYTES + DIGEST_BYTES + HOUR_BYTES
#: Digits of the digest, in hex.
DIGEST_DIGITS = 2 * DIGEST_BYTES
#: Marks of a bucket above which it is split; the mean is about twice that. More would save memory, but each new mark
#: rewrites its bucket.
SPLIT_MARKS = 16
#: Maximum marks of a bucket, which only one id in thousands of runs can reach; the oldest are dropped.
MAX_BUCKET_MARKS = 4096
#: Hours of expiry are numbers modulo 2**16.
MAX_TTL_HOURS = 2**15 - 1

#: Functions on marks. The first IDENTITY bytes of a mark are its identity.
MARK_RECORDS = (
    BUCKETS
    + f"""
local SIZE, IDENTITY = {MARK_BYTES}, {MARK_BYTES - HOUR_BYTES}
-- Return the offset of a record that starts with these bytes.
local function find_mark(records, start)
  local at = find(records, start, 1, true)
  while at and (at - 1) % SIZE > 0 do at = find(records, start, at + 1, true) end
  return at
end
local function without_mark(records, at)
  return sub(records, 1, at - 1) .. sub(records, at + SIZE)
end
-- Return the checksum of a run in a mark.
local function run_checksum(run) return sub(checksum_of(run), 1, {RUN_BYTES}) end
-- Return the digest in a mark of what was sent. field: the whole digest, in hex.
local function digest_of(field)
  local digits = sub(field, 1, {DIGEST_DIGITS})
  return (string.gsub(digits, '..', function(byte) return string.char(tonumber(byte, 16)) end))
end
-- Return a bucket's records; none if producers wrote something else there.
local function whole_marks(records)
  return records and #records % SIZE == 0 and records or ''
end
local function current_hour() return math.floor(redis.call('TIME')[1] / 3600) end
local function expired(records, at, hour)
  return (read('>H', records, at + IDENTITY) - hour) % 65536 >= 32768
end
"""
)
#: Defines `forget_marks`, which deletes the marks of an id, and returns whether there were any. run: only the marks of
#: this run, and those of runs with the same checksum; nil for all. marks: feedmill:sent-marks, string, and its buckets.
FORGET_MARKS = (
    MARK_RECORDS
    + """
local function forget_marks(marks, id, run)
  local key, records, checksum = bucket_of(marks, id)
  records = whole_marks(records)
  local start = run and checksum .. run_checksum(run) or checksum
  local at = find_mark(records, start)
  if at then
    repeat
      records = without_mark(records, at)
      at = find_mark(records, start)
    until not at
    shrink_bucket(key, records)
    return true
  end
  return false
end
"""
)


def checksum(post_id: str) -> bytes:
    """Return the checksum of an id with which its records start."""
    return crc32(post_id.encode()).to_bytes(ID_BYTES, "big")


def bucket_key(name: str, post_id: str, count: int) -> str:
    """Return the key of the bucket of an id. name: the key of a table that has `count` buckets."""
    half = 1 << (count.bit_length() - 1)
    number = int.from_bytes(checksum(post_id), "big") % (2 * half)
    return f"{name}:{number if number < count else number - half}"
