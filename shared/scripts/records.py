"""Parts of other scripts: records of results, in buckets. Their format: shared/result_records.py."""

from shared.result_records import SCORE
from shared.scripts.buckets import BUCKETS

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
