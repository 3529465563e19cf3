-- Poison tracking (workers/pipeline/poison.py): record the posts of a forward pass, and count deaths.

-- A function needs one answer instead of two, and is faster to build than a pipeline.
--
--   ARGV[1]  worker and lane    ARGV[2]  {"at": seconds, "posts": {message: [index, …]}}, JSON    ARGV[3]  ttl, seconds
register('note', WRITES, function(ARGV)
  redis.call('HSET', PASSES, ARGV[1], ARGV[2])
  redis.call('EXPIRE', PASSES, ARGV[3])
end)

--   ARGV[1]  digest of the message's id    ARGV[2]  prefix of this worker's records    ARGV[3]  ttl, seconds
register('count_deaths', SHRINKS, function(ARGV)
  local now, deaths = tonumber(redis.call('TIME')[1]), POISON .. ARGV[1]
  local notes = redis.call('HGETALL', PASSES)
  for i = 1, #notes, 2 do
    local name, note = notes[i], cjson.decode(notes[i + 1])
    local mine = note.posts[ARGV[1]]
    if now - note.at > tonumber(ARGV[3]) then
      redis.call('HDEL', PASSES, name)
    elseif mine and string.sub(name, 1, #ARGV[2]) ~= ARGV[2] then
      for _, index in ipairs(mine) do redis.call('HINCRBY', deaths, index, 1) end
      redis.call('EXPIRE', deaths, ARGV[3])
      note.posts[ARGV[1]] = nil
      if next(note.posts) then
        redis.call('HSET', PASSES, name, cjson.encode(note))
      else
        redis.call('HDEL', PASSES, name)
      end
    end
  end
  return redis.call('HGETALL', deaths)
end)
