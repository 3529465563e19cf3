"""Parts of other scripts: keep small records of posts in few keys, because a key of its own costs over 100 bytes.

A table's records are in buckets: strings with the records of several ids one after another. A record starts with a
checksum of its id, which determines its bucket. The table grows by linear hashing: when the next bucket in turn is
large enough, half of its records move to a new bucket. So the mean size of a bucket does not depend on the number of
records, and an id's records are always in one bucket. The table's key holds its number of buckets.

Records carry the time when they expire, and leave their bucket with the next write to it. The key of a bucket expires
after its last record.
"""

from zlib import crc32

#: Bytes of an id's checksum in records: CRC-32, which takes Python a fourth of SHA-1's time, and can be written in Lua.
ID_BYTES = 4
#: Buckets of a new table; a power of two.
MIN_BUCKETS = 16
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


def checksum(post_id: str) -> bytes:
    """Return the checksum of an id with which its records start."""
    return crc32(post_id.encode()).to_bytes(ID_BYTES, "big")


def bucket_key(name: str, post_id: str, count: int) -> str:
    """Return the key of the bucket of an id. name: the key of a table that has `count` buckets."""
    half = 1 << (count.bit_length() - 1)
    number = int.from_bytes(checksum(post_id), "big") % (2 * half)
    return f"{name}:{number if number < count else number - half}"
