-- Poison tracking (workers/pipeline/poison.py): record the posts of a forward pass, and count deaths.

-- A function needs one answer instead of two, and is faster to build than a pipeline.
--
--   KEYS[1]  feedmill:passes   hash: worker and lane -> {"at": seconds, "posts": {message: [index, …]}}, JSON
--   ARGV[1]  worker and lane   ARGV[2]  the record    ARGV[3]  ttl, seconds
register('note', WRITES, function(KEYS, ARGV)
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end)

--   KEYS[1]  see _NOTE    KEYS[2]  feedmill:suspect:<id>  hash: index of a post -> deaths
--   ARGV[1]  digest of the message's id    ARGV[2]  prefix of this worker's records    ARGV[3]  ttl, seconds
register('count_deaths', SHRINKS, function(KEYS, ARGV)
  local now = tonumber(redis.call('TIME')[1])
  local notes = redis.call('HGETALL', KEYS[1])
  for i = 1, #notes, 2 do
    local name, note = notes[i], cjson.decode(notes[i + 1])
    local mine = note.posts[ARGV[1]]
    if now - note.at > tonumber(ARGV[3]) then
      redis.call('HDEL', KEYS[1], name)
    elseif mine and string.sub(name, 1, #ARGV[2]) ~= ARGV[2] then
      for _, index in ipairs(mine) do redis.call('HINCRBY', KEYS[2], index, 1) end
      redis.call('EXPIRE', KEYS[2], ARGV[3])
      note.posts[ARGV[1]] = nil
      if next(note.posts) then
        redis.call('HSET', KEYS[1], name, cjson.encode(note))
      else
        redis.call('HDEL', KEYS[1], name)
      end
    end
  end
  return redis.call('HGETALL', KEYS[2])
end)
