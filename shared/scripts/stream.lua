-- Reading the results stream (feedmill/outcomes/rows.py).

--   ARGV[1]  maximum entries    ARGV[2]  the group    ARGV[3]  its member
--
-- A member first receives its pending entries: delivered to it, but not acknowledged. Returns 1 for these, else 0; the
-- entries; the id of the group's latest entry before them, and its number, nothing if unknown.
register('fetch_group', SHRINKS, function(ARGV)
  local stream, group, before = RESULTS_STREAM, ARGV[2], {}
  local own = redis.call('XREADGROUP', 'GROUP', group, ARGV[3], 'COUNT', ARGV[1], 'STREAMS', stream, '0')
  if own and #own[1][2] > 0 then return {1, own[1][2]} end
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local known = by_name(info)
    if known['name'] == group then before = known end
  end
  local new = redis.call('XREADGROUP', 'GROUP', group, ARGV[3], 'COUNT', ARGV[1], 'STREAMS', stream, '>')
  local entries = new and new[1][2] or {}
  if #entries > 0 then -- Redis' own count leaves out trimmed entries
    local last = entries[#entries]
    redis.call('XGROUP', 'SETID', stream, group, last[1], 'ENTRIESREAD', number_of(last))
  end
  return {0, entries, before['last-delivered-id'], before['entries-read']}
end)

--   ARGV[1]  the group           ARGV[2]  the member that takes over
--   ARGV[3]  milliseconds after which an entry is taken over
--   ARGV[4]  id to start from    ARGV[5]  maximum entries
--   ARGV[6]  milliseconds of inactivity after which a member is removed
--
-- Returns the next id to start from, and the ids of deleted entries.
register('claim', SHRINKS, function(ARGV)
  local stream, group, member = RESULTS_STREAM, ARGV[1], ARGV[2]
  local claimed = redis.call('XAUTOCLAIM', stream, group, member, ARGV[3], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
    local known = by_name(info)
    if known['name'] ~= member and known['pending'] == 0 and known['idle'] > tonumber(ARGV[6]) then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, known['name'])
    end
  end
  return {claimed[1], claimed[3] or {}}
end)

-- A plain XRANGE returns nine small replies per entry, whose parsing takes the client as long as the rest of an export.
-- Joining the texts into one reply takes Redis three times as long as this function.
--
--   ARGV[1]  the cursor    ARGV[2]  bytes of entries after which to stop
--
-- Returns a flat list: 1 if no entries are left, else 0; numbers of the first and of the last entry; then the id,
-- classification and post of each.
register('fetch_rows', READS, function(ARGV)
  local last, bytes, rows, ended = ARGV[1], 0, {0, 0, 0}, false
  repeat
    local entries = redis.call('XRANGE', RESULTS_STREAM, '(' .. last, '+', 'COUNT', 50)
    for _, entry in ipairs(entries) do
      local n, fields = #rows, by_name(entry[2])
      local found, post = fields['classification'] or '', fields['post'] or ''
      last = entry[1]
      rows[n + 1], rows[n + 2], rows[n + 3] = last, found, post
      bytes = bytes + #found + #post
      rows[3] = tonumber(fields['number']) or 0
      if n == 3 then rows[2] = rows[3] end
    end
    ended = #entries < 50
  until ended or bytes >= tonumber(ARGV[2])
  rows[1] = ended and 1 or 0
  return rows
end)

--   ARGV[1]  ids, as JSON
register('check_posts', READS, function(ARGV)
  local ids, found = cjson.decode(ARGV[1]), {}
  local purged = tombstones(ids)
  for i, records in ipairs(records_of(STORED, ids)) do
    found[i] = purged[i] and 'false' or score_in(records) or 'null'
  end
  return '[' .. table.concat(found, ',') .. ']'
end)
