--[[
decide/dry_queue: the queue (shared/fair_queue) for a decision that is only to be told: what it would write is kept
here, for this decision to read, and never gets to Redis.

Guarantee: writes nothing. One ticket may enter. Tickets that expired or gave way count as taken out for whose turn it
is and for the length of the queue; the place of their flow stays as it is.
Takes shared/fair_queue, the key of the queue, the time in us and how long a ticket lives (ms). Returns the queue.
--]]
local sub, byte, max = string.sub, string.byte, math.max
local FLOW_BYTES, TICKET_SIZE = 9, ">I4I4" -- of a member of `queue2`; of a ticket's record
local READS = { HGET = 1, HLEN = 1, HMGET = 1, ZCARD = 1, ZCOUNT = 1, ZLEXCOUNT = 1, ZRANGE = 1, ZRANGEBYLEX = 1,
  ZRANGEBYSCORE = 1, ZRANK = 1, ZREVRANGE = 1, ZREVRANGEBYLEX = 1, ZSCORE = 1 }

-- As Redis orders members. Lua compares strings by the locale of the server.
local function is_before(a, b)
  for at = 1, max(#a, #b) do
    local x, y = byte(a, at) or -1, byte(b, at) or -1
    if x ~= y then return x < y end
  end
  return false
end

return function(fair_queue, queue_key, now_us, ticket_ms)
  local tickets, flows = queue_key .. ":tickets", queue_key .. ":flows"
  local lengths, clock = queue_key .. ":lengths", queue_key .. ":clock"
  local records, gone, more_us = {}, 0, 0 -- id -> record, false if it is taken out
  -- The ticket that enters: its member, flow and rank; its flow's place, that place before, and virtual time.
  local guest, guest_flow, rank, place, place_before, time, is_new_flow
  local reads, writes = {}, {}

  function writes.ZADD(key, score, member)
    if key == queue_key then
      rank, guest, guest_flow = redis.call("ZLEXCOUNT", key, "-", "(" .. member), member, sub(member, 1, FLOW_BYTES)
    elseif key == flows then
      place, time = member, tonumber(score)
    elseif key == lengths then
      is_new_flow = true
    end
  end
  function writes.ZREM(key, member)
    if key == flows then place_before = member end
  end
  function writes.HSET(key, id, record)
    if key == tickets then records[id] = record end
  end
  function writes.HINCRBY(key, field, by)
    if key == clock and field == "work_us" then more_us = more_us + tonumber(by) end
  end

  function reads.HGET(key, field)
    if key == tickets and records[field] ~= nil then return records[field] end
    local found = redis.call("HGET", key, field)
    return key == clock and field == "work_us" and (tonumber(found) or 0) + more_us or found
  end
  function reads.HMGET(key, ...)
    local found = redis.call("HMGET", key, ...)
    for k, id in ipairs({ ... }) do
      if records[id] ~= nil then found[k] = records[id] end
    end
    return found
  end
  function reads.ZCARD(key)
    local more = key == queue_key and (guest and 1 or 0) - gone or key == flows and is_new_flow and 1 or 0
    return redis.call("ZCARD", key) + more
  end
  function reads.ZCOUNT(key, least, most)
    local among = key == flows and is_new_flow and time >= tonumber(least) and time < tonumber(sub(most, 2))
    return redis.call("ZCOUNT", key, least, most) + (among and 1 or 0)
  end
  function reads.ZSCORE(key, member)
    local found = redis.call("ZSCORE", key, member)
    return key == lengths and guest and member == guest_flow and (tonumber(found) or 0) + 1 or found
  end
  -- fair_queue asks for bounds that are flows: from the first member of all or of a flow, to the end or to a flow.
  function reads.ZLEXCOUNT(key, least, most)
    local found = redis.call("ZLEXCOUNT", key, least, most)
    local from, to = sub(least, 2), sub(most, 2)
    local among = guest and key == queue_key and not is_before(guest, from) and is_before(guest, to)
    return found + (among and 1 or 0)
  end
  function reads.ZRANGEBYLEX(key, least, most, ...)
    local found = redis.call("ZRANGEBYLEX", key, least, most, ...)
    local from, to = sub(least, 2), sub(most, 2)
    if guest and key == queue_key and not is_before(guest, from) and is_before(guest, to)
        and (not found[1] or is_before(guest, found[1])) then
      found[1] = guest
    end
    return found
  end
  function reads.ZRANK(key, member)
    if key == queue_key and member == guest then return rank end
    if key ~= flows or member ~= place then return redis.call("ZRANK", key, member) end
    local found = redis.call("ZCOUNT", key, "-inf", string.format("(%.0f", time))
    for _, other in ipairs(redis.call("ZRANGEBYSCORE", key, time, time)) do
      if is_before(other, place) and other ~= place_before then found = found + 1 end
    end
    return found
  end
  function reads.ZRANGE(key, from, to, ...)
    if key == queue_key and guest then
      if to < rank then return redis.call("ZRANGE", key, from, to) end
      if from > rank then return redis.call("ZRANGE", key, from - 1, to - 1) end
      local found = to > from and redis.call("ZRANGE", key, from, to - 1) or {}
      table.insert(found, rank - from + 1, guest)
      return found
    end
    if key ~= flows or not place then return redis.call("ZRANGE", key, from, to, ...) end
    local line, told, is_told, at = redis.call("ZRANGE", key, 0, to + 1, "WITHSCORES"), {}, false, 0
    local function tell(member, score)
      if at >= from and at <= to then told[#told + 1], told[#told + 2] = member, score end
      at = at + 1
    end
    for k = 1, #line, 2 do
      local member, score = line[k], tonumber(line[k + 1])
      if not is_told and (time < score or time == score and is_before(place, member)) then
        tell(place, time)
        is_told = true
      end
      if member ~= place and member ~= place_before then tell(member, score) end
    end
    if not is_told then tell(place, time) end
    return told
  end

  local function call(command, ...)
    local own = reads[command] or writes[command]
    if own then return own(...) end
    return READS[command] and redis.call(command, ...)
  end

  local queue = fair_queue(queue_key, now_us, ticket_ms, nil, call)
  function queue.renew() end
  function queue.leave(id)
    local ticket = queue.find(id)
    if ticket and ticket ~= queue.DISPLACED then
      local _, size_us = struct.unpack(TICKET_SIZE, ticket)
      gone, more_us = gone + 1, more_us - size_us
    end
    records[id] = false
  end
  return queue
end
