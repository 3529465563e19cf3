-- Reading the results stream: fetch entries, and count those that were trimmed unread (shared/scripts/stream.py).

-- Return an object from a flat list of names and values.
local function by_name(flat)
  local named = {}
  for i = 1, #flat, 2 do named[flat[i]] = flat[i + 1] end
  return named
end

-- Return the numbers of the store: entries stored, trimmed, purged and present (`length`); and the first one's id.
local function figures_of(stream, counters)
  local counts = redis.call('HMGET', counters, 'stored', 'trimmed')
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local now = {stored = tonumber(counts[1] or 0), trimmed = tonumber(counts[2] or 0), first = first and first[1] or ''}
  now.length = redis.call('XLEN', stream)
  now.purged = now.stored - now.trimmed - now.length
  return now
end

-- Find the gap after `cursor`, given the `place` that the last call returned for it, or "".
--
-- Returns the number of entries that are gone, -1 if unknown; the number purged meanwhile; the number of entries up to
-- the cursor, or nil; and a function that returns the new place: an entry's id, and the numbers of entries written up
-- to it, trimmed, and purged.
local function gap_after(stream, now, cursor, place)
  local at, position, trimmed_then, purged_then = string.match(place, '^(%S+) (%d+) (%d+) (-?%d+)$')
  if at ~= cursor then position = nil end
  local gone, meanwhile = 0, 0
  -- If no entry this old is left, entries after it may have been trimmed as well.
  local behind = #redis.call('XRANGE', stream, '-', cursor, 'COUNT', 1) == 0
  if behind and position then
    if now.trimmed > tonumber(trimmed_then) then
      gone, meanwhile = math.max(now.stored - position - now.length, 0), now.purged - purged_then
    end
  elseif behind and now.length > 0 and now.trimmed > 0 and cursor ~= '0-0' then
    gone = -1
  end
  return gone, meanwhile, position, function(read, last, ended)
    if ended then
      position, purged_then = now.stored, now.purged
    elseif behind then
      position, purged_then = now.stored - now.length + read, now.purged
    elseif position then
      position = position + read
    end
    return position and string.format('%s %d %d %d', last, position, now.trimmed, purged_then) or '', position
  end
end

-- Return 1 if the entry at the cursor was read, and the stream's ids went back since then, else 0.
local function is_lost(stream, cursor, position)
  local time, number = string.match(cursor, '^(%d+)%-(%d+)$')
  if not position or not time or number == '18446744073709551615' then return 0 end -- the latter is no entry
  local info = redis.pcall('XINFO', 'STREAM', stream)
  if info.err then return 0 end
  local last_time, last_number = string.match(by_name(info)['last-generated-id'], '^(%d+)%-(%d+)$')
  time, number, last_time, last_number = tonumber(time), tonumber(number), tonumber(last_time), tonumber(last_number)
  return (last_time < time or last_time == time and last_number < number) and 1 or 0
end

--   KEYS[1]  feedmill:results, stream      KEYS[2]  feedmill:counters, hash    KEYS[3]  feedmill:groups, hash
--   ARGV[1]  maximum entries               ARGV[2]  the group, or ""           ARGV[3]  its member
--   without a group: ARGV[4]  the cursor, or "$" for the end of the stream     ARGV[5]  its place, or ""
--
-- A group's member first receives its pending entries: delivered to it, but not acknowledged. A group's place is stored
-- in KEYS[3]. Returns the fields of Fetched in order. A group's place is never ahead: Redis loses both together.
local function fetch(KEYS, ARGV)
  local stream, group, count, groups = KEYS[1], ARGV[2], tonumber(ARGV[1]), {}
  local now, cursor, place = figures_of(stream, KEYS[2]), ARGV[4], ARGV[5]
  if group ~= '' then
    local own = redis.call('XREADGROUP', 'GROUP', group, ARGV[3], 'COUNT', count, 'STREAMS', stream, '0')
    if own and #own[1][2] > 0 then return {1, own[1][2], '', '', '', 0, 0, now.first, now.trimmed, now.purged, 0} end
    for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
      local known = by_name(info)
      groups[known['name']] = true
      if known['name'] == group then cursor = known['last-delivered-id'] end
    end
    place = redis.call('HGET', KEYS[3], group) or ''
  elseif cursor == '$' then
    local newest = newest_of(stream)
    cursor = newest and newest[1] or '0-0'
    place = string.format('%s %d %d %d', cursor, now.stored, now.trimmed, now.purged)
  end
  local gone, meanwhile, position, place_after = gap_after(stream, now, cursor, place)
  local before, entries, lost = cursor, nil, 0
  if group ~= '' then
    local new = redis.call('XREADGROUP', 'GROUP', group, ARGV[3], 'COUNT', count, 'STREAMS', stream, '>')
    entries = new and new[1][2] or {}
  else
    entries = redis.call('XRANGE', stream, '(' .. cursor, '+', 'COUNT', count)
    if #entries == 0 then lost = is_lost(stream, cursor, position) end
  end
  if #entries > 0 then cursor = entries[#entries][1] end
  local after = place_after(#entries, cursor, #entries < count)
  if group ~= '' and after ~= '' and after ~= place then
    if place == '' then
      for _, known in ipairs(redis.call('HKEYS', KEYS[3])) do
        if not groups[known] then redis.call('HDEL', KEYS[3], known) end
      end
    end
    redis.pcall('HSET', KEYS[3], group, after) -- pcall: reading must work even if a full Redis refuses the write
  end
  return {0, entries, before, cursor, after, gone, meanwhile, now.first, now.trimmed, now.purged, lost}
end
register('fetch', READS, fetch)
register('fetch_group', SHRINKS, fetch)

--   KEYS[1], KEYS[2]  as for `fetch`
--   ARGV[1]  the group           ARGV[2]  the member that takes over
--   ARGV[3]  milliseconds after which an entry is taken over
--   ARGV[4]  id to start from    ARGV[5]  maximum entries
--   ARGV[6]  milliseconds of inactivity after which a member is removed
--
-- Returns the next id to start from; the ids of deleted entries; and the fields of StreamState.
register('claim', SHRINKS, function(KEYS, ARGV)
  local stream, group, member = KEYS[1], ARGV[1], ARGV[2]
  local now = figures_of(stream, KEYS[2])
  local claimed = redis.call('XAUTOCLAIM', stream, group, member, ARGV[3], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
    local known = by_name(info)
    if known['name'] ~= member and known['pending'] == 0 and known['idle'] > tonumber(ARGV[6]) then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, known['name'])
    end
  end
  return {claimed[1], claimed[3] or {}, now.first, now.trimmed, now.purged}
end)

-- A plain XRANGE returns nine small replies per entry, whose parsing takes the client as long as the rest of an export.
-- Joining the texts into one reply takes Redis three times as long as this function.
--
--   KEYS[1], KEYS[2]  as for `fetch`
--   ARGV[1]  the cursor    ARGV[2]  its place, or ""    ARGV[3]  end of the range, in XRANGE syntax
--   ARGV[4]  bytes of entries after which to stop
--
-- Returns a flat list: 1 if no entries are left, else 0; the new cursor; its place; the numbers of entries gone before,
-- and left after them, each -1 if unknown; `lost`; then the texts.
register('fetch_rows', READS, function(KEYS, ARGV)
  local stream, last, to_end, bytes, read, ended = KEYS[1], ARGV[1], ARGV[3] == '+', 0, 0, false
  local now = figures_of(stream, KEYS[2])
  local gone, _, position, place_after = gap_after(stream, now, last, ARGV[2])
  local rows = {0, '', '', gone, -1, 0}
  repeat
    local entries = redis.call('XRANGE', stream, '(' .. last, ARGV[3], 'COUNT', 50)
    for _, entry in ipairs(entries) do
      local n, fields = #rows, by_name(entry[2])
      local found, post = fields['classification'] or '', fields['post'] or ''
      last = entry[1]
      rows[n + 1], rows[n + 2], rows[n + 3] = last, found, post
      bytes = bytes + #found + #post
    end
    read, ended = read + #entries, #entries < 50
  until ended or bytes >= tonumber(ARGV[4])
  if read == 0 then rows[6] = is_lost(stream, last, position) end
  rows[1], rows[2] = ended and 1 or 0, last
  rows[3], position = place_after(read, last, ended and to_end)
  if position and to_end then rows[5] = now.stored - position end
  return rows
end)

--   KEYS[1]  feedmill:stored, table    ARGV[1]  prefix of the names of tombstones    ARGV[2]  ids, as JSON
register('check_posts', READS, function(KEYS, ARGV)
  local ids, found = cjson.decode(ARGV[2]), {}
  local purged = tombstones(ARGV[1], ids)
  for i, records in ipairs(records_of(KEYS[1], ids)) do
    found[i] = purged[i] and 'false' or score_in(records) or 'null'
  end
  return '[' .. table.concat(found, ',') .. ']'
end)
