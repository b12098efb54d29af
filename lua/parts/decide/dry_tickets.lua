--[[
decide/dry_tickets: a queue (shared/tickets) for a decision in mode DRY: what the decision would write to Redis is held
in this table, where the decision reads it.

Guarantee: writes nothing. One ticket may enter, that of a request which has none. Tickets that expired or were
displaced neither get a turn nor count in the length of the queue; the place of their flow stays as it is.
Takes shared/tickets, the key of the queue, the time in us and the lifetime of a ticket (ms). Returns the queue.
--]]
local sub, byte, max = string.sub, string.byte, math.max
-- Reads that need no correction: shared/tickets makes them before the ticket enters, or where it makes no difference.
local READ_AS_IT_IS = { ZRANGEBYSCORE = 1, ZREVRANGE = 1, ZREVRANGEBYLEX = 1 }

-- Compares as Redis orders members: Lua's own comparison follows the locale of the server.
local function is_before(a, b)
  for at = 1, max(#a, #b) do
    local x, y = byte(a, at) or -1, byte(b, at) or -1
    if x ~= y then return x < y end
  end
  return false
end

return function(make_queue, queue2_key, now_us, ticket_ms)
  local tickets_key, flows_key = queue2_key .. ":tickets", queue2_key .. ":flows"
  local lengths_key, clock_key = queue2_key .. ":lengths", queue2_key .. ":clock"
  local records, gone, more_us = {}, 0, 0 -- new records by id (false: deleted); number of deleted tickets; added work
  -- The ticket that enters: its member and rank in the queue, its flow, and the flow's place and virtual time.
  local guest, rank, flow, place, time, is_new_flow
  local commands = {}

  local function is_of_its_flow(member) return sub(member, PLACE_BYTES + 1) == flow end -- member: of :flows

  function commands.ZADD(key, score, member)
    if key == queue2_key then
      rank, guest, flow = redis.call("ZLEXCOUNT", key, "-", "(" .. member), member, sub(member, 1, FLOW_BYTES)
    elseif key == flows_key then
      place, time = member, tonumber(score)
    elseif key == lengths_key then
      is_new_flow = true
    end
  end
  function commands.HSET(key, id, record)
    if key == tickets_key then records[id] = record end
  end
  function commands.HINCRBY(key, field, by)
    if key == clock_key and field == "work_us" then more_us = more_us + tonumber(by) end
  end

  function commands.HGET(key, field)
    if key == tickets_key and records[field] ~= nil then return records[field] end
    local found = redis.call("HGET", key, field)
    return key == clock_key and field == "work_us" and (tonumber(found) or 0) + more_us or found
  end
  function commands.HMGET(key, ...)
    local found = redis.call("HMGET", key, ...)
    for k, id in ipairs({ ... }) do
      if records[id] ~= nil then found[k] = records[id] end
    end
    return found
  end
  function commands.ZCARD(key)
    local more = key == queue2_key and (guest and 1 or 0) - gone or key == flows_key and is_new_flow and 1 or 0
    return redis.call("ZCARD", key) + more
  end
  function commands.ZCOUNT(key, least, most)
    local among = key == flows_key and is_new_flow and time >= tonumber(least) and time < tonumber(sub(most, 2))
    return redis.call("ZCOUNT", key, least, most) + (among and 1 or 0)
  end
  function commands.ZSCORE(key, member)
    local found = redis.call("ZSCORE", key, member)
    return key == lengths_key and member == flow and (tonumber(found) or 0) + 1 or found
  end
  -- shared/tickets counts all tickets that precede a flow's tickets, or the tickets of a flow.
  function commands.ZLEXCOUNT(key, least, most)
    local among = flow and (least == "-" and is_before(flow, sub(most, 2)) or sub(least, 2) == flow)
    return redis.call("ZLEXCOUNT", key, least, most) + (among and 1 or 0)
  end
  -- shared/tickets reads the first ticket of a flow.
  function commands.ZRANGEBYLEX(key, least, ...)
    local found = redis.call("ZRANGEBYLEX", key, least, ...)
    if sub(least, 2) == flow and (not found[1] or is_before(guest, found[1])) then found[1] = guest end
    return found
  end
  function commands.ZRANK(key, member)
    if member == guest then return rank end
    if member ~= place then return redis.call("ZRANK", key, member) end
    local found = redis.call("ZCOUNT", key, "-inf", string.format("(%.0f", time))
    for _, other in ipairs(redis.call("ZRANGEBYSCORE", key, time, time)) do
      if is_before(other, place) and not is_of_its_flow(other) then found = found + 1 end
    end
    return found
  end
  function commands.ZRANGE(key, from, to, ...)
    if not guest then return redis.call("ZRANGE", key, from, to, ...) end
    if key == queue2_key then
      if to < rank then return redis.call("ZRANGE", key, from, to) end
      if from > rank then return redis.call("ZRANGE", key, from - 1, to - 1) end
      local found = to > from and redis.call("ZRANGE", key, from, to - 1) or {}
      table.insert(found, rank - from + 1, guest)
      return found
    end
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
      if not is_of_its_flow(member) then tell(member, score) end
    end
    if not is_told then tell(place, time) end
    return told
  end

  local function call(command, ...)
    if commands[command] then return commands[command](...) end
    return READ_AS_IT_IS[command] and redis.call(command, ...)
  end

  local queue = make_queue(queue2_key, now_us, ticket_ms, nil, call)
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
