"""Parts of other scripts: records of sent posts (marks), in buckets."""

from shared.scripts.buckets import BUCKETS, ID_BYTES

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
