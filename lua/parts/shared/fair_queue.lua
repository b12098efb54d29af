--[[
shared/fair_queue: the waiting requests of one model, and whose turn it is.

Guarantee: order is (priority class, virtual time of the tenant in that class, arrival). A flow is a tenant in a class;
its tickets wait in the order they came. A flow's virtual time moves when a ticket of it is served, by what the engine
has to do for it, and begins where the class stands (which moves by that work divided among the flows that wait). So
whoever waits gets the same work done, however much it asks for and whatever of that is given up. A ticket is a lease:
who does not renew it loses it. An empty queue leaves nothing but marks of displaced tickets, which are leases, too.
A part that is lost alone costs its tickets, no error. Takes the key `queue`, the time in us and how long a ticket
lives (ms); returns functions. Keys: queue (lexical: flow, arrival, id), under its name :tickets (id -> tokens, flow,
arrival, who cannot serve it; empty: displaced), :leases (id -> expiry ms), :flows (arrival of its first ticket, flow ->
class * 2^44 + virtual time), :lengths (flow -> class * 2^20 + tickets), :served (flow -> as in flows, of those that do
not wait and are ahead of their class), :clock (class -> where it stands; and the tokens of all tickets).
--]]
local call, sub, format, unpack_from = redis.call, string.sub, string.format, struct.unpack
local CLASS, LENGTH, FLOW, ARRIVAL, HEAD, PIECE = 2 ^ 44, 2 ^ 20, 9, 16, 29, 8

return function(queue, now_us, ticket_ms)
  local tickets, leases, flows = queue .. ":tickets", queue .. ":leases", queue .. ":flows"
  local lengths, served, clock = queue .. ":lengths", queue .. ":served", queue .. ":clock"
  local line, now = {}, now_us / 1000

  local function class_of(flow) return (flow:byte(1) - 65) * CLASS end
  local function exact(number) return format("%.0f", number) end
  -- Where the class of a flow stands; nobody begins before it.
  local function floor_of(flow) return tonumber(call("HGET", clock, sub(flow, 1, 1))) or class_of(flow) end

  function line.flow(priority, tenant) return string.char(65 + priority) .. tenant end
  function line.waiting() return call("ZCARD", queue) end
  function line.tokens() return tonumber(call("HGET", clock, "tokens")) or 0 end
  function line.find(id) return call("HGET", tickets, id) end
  function line.renew(id) call("ZADD", leases, "XX", exact(now + ticket_ms), id) end

  -- The first ticket of a flow tells its place among flows of the same time.
  local function place_of(flow)
    local first = call("ZRANGEBYLEX", queue, "[" .. flow, "(" .. flow .. "\255", "LIMIT", 0, 1)[1]
    return first and sub(first, FLOW + 1, FLOW + ARRIVAL) .. flow
  end
  local function move(flow, before, time)
    local after = place_of(flow)
    if before and before ~= after then call("ZREM", flows, before) end
    if after then call("ZADD", flows, exact(time), after) end
    return after
  end

  function line.enter(id, flow, tokens, barred, waited_ms)
    local before, member = place_of(flow), flow .. format("%016.0f", now_us - waited_ms * 1000) .. id
    local time = before and call("ZSCORE", flows, before) or call("ZSCORE", served, flow) or 0
    call("ZADD", queue, 0, member)
    call("HSET", tickets, id, struct.pack(">I4", tokens) .. sub(member, 1, FLOW + ARRIVAL) .. barred)
    call("ZADD", leases, exact(now + ticket_ms), id)
    call("HINCRBY", clock, "tokens", tokens)
    if not before then
      time = math.max(floor_of(flow), tonumber(time))
      call("ZREM", served, flow)
      call("ZADD", lengths, (flow:byte(1) - 65) * LENGTH, flow)
    end
    call("ZINCRBY", lengths, 1, flow)
    move(flow, before, time)
  end

  -- Take a ticket out. done: the work that it was served with, nil if it was not.
  function line.leave(id, done)
    local record = line.find(id)
    call("HDEL", tickets, id)
    call("ZREM", leases, id)
    if not record or record == "" then return end
    local flow = sub(record, 5, 4 + FLOW)
    local before, class = place_of(flow), class_of(flow)
    local time, stands = tonumber(before and call("ZSCORE", flows, before)) or class, floor_of(flow)
    if done then
      local share = done / call("ZCOUNT", flows, exact(class), "(" .. exact(class + CLASS))
      stands = math.min(math.max(stands, time) + math.ceil(share), class + CLASS - 1)
      time = math.min(time + done, class + CLASS - 1)
      call("HSET", clock, sub(flow, 1, 1), exact(stands))
      call("ZREMRANGEBYSCORE", served, exact(class), exact(stands)) -- they would begin there anyway
    end
    call("ZREM", queue, sub(record, 5, HEAD) .. id)
    call("HINCRBY", clock, "tokens", -unpack_from(">I4", record))
    call("ZINCRBY", lengths, -1, flow)
    if not move(flow, before, time) then
      call("ZREM", lengths, flow)
      if time > stands then call("ZADD", served, exact(time), flow) end
    end
    if line.waiting() == 0 then call("UNLINK", served, clock) end
  end

  function line.reap(most)
    for _, id in ipairs(call("ZRANGEBYSCORE", leases, "-inf", exact(now), "LIMIT", 0, most)) do line.leave(id) end
    local ahead = call("ZRANGEBYSCORE", leases, "(" .. exact(now + ticket_ms), "+inf", "LIMIT", 0, most)
    for _, id in ipairs(ahead) do line.renew(id) end -- the clock stepped back: the dead would stand in the way
  end

  -- The queue is full: the last ticket of the longest line of the last class gives way, unless that line is the
  -- newcomer's own, or would be. So a tenant that fills the queue shuts out nobody but itself.
  function line.displace(flow)
    local longest = call("ZREVRANGE", lengths, 0, 0, "WITHSCORES")
    local own = tonumber(call("ZSCORE", lengths, flow)) or (flow:byte(1) - 65) * LENGTH
    if not longest[1] or tonumber(longest[2]) <= own + 1 then return false end
    local last = call("ZREVRANGEBYLEX", queue, "(" .. longest[1] .. "\255", "[" .. longest[1], "LIMIT", 0, 1)[1]
    if not last then return false end
    local id = sub(last, HEAD - 3)
    line.leave(id)
    call("HSET", tickets, id, "") -- its replica is told when it asks
    call("ZADD", leases, exact(now + ticket_ms), id)
    return true
  end

  -- Whose turn it is: as many tickets, in order, as have room (see shared/capacity), but for those that none of the
  -- free
  -- workers can serve. Each is taken for what its prompt has in tokens. Looks at no more than `most`, and of those that
  -- cannot be served at no more of one flow than its part of that: so a tenant whose worker is busy holds up no other.
  function line.turns(room, most)
    local turns, left, share = {}, room.tokens, room.tokens / math.max(room.count, 1)
    local order, head, score, ahead, place, missed = {}, 1, {}, {}, {}, {}
    if left <= 0 then return turns end
    local found = call("ZRANGE", flows, 0, most - 1, "WITHSCORES")
    for k = 1, #found, 2 do order[#order + 1], score[found[k]] = found[k], tonumber(found[k + 1]) end
    local patience = most / #order
    for _ = 1, most do
      local flow = order[head]
      if not flow or left <= 0 then break end
      local k, name = place[flow] or 0, sub(flow, ARRIVAL + 1)
      if k % PIECE == 0 then
        ahead[flow] = call("ZRANGEBYLEX", queue, "[" .. name, "(" .. name .. "\255", "LIMIT", k, PIECE)
      end
      local member = ahead[flow][k % PIECE + 1]
      local id = member and sub(member, HEAD - 3)
      local record = id and line.find(id)
      local tokens = record and #record >= HEAD and unpack_from(">I4", record)
      place[flow] = k + 1
      if tokens and room.serves(sub(record, HEAD + 1)) then
        turns[id], left, score[flow], head = true, left - math.min(tokens, share), score[flow] + tokens, head + 1
        local low, high = head, #order + 1
        while low < high do
          local middle = math.floor((low + high) / 2)
          local at = order[middle]
          local before = score[at] < score[flow] or score[at] == score[flow] and at < flow
          low, high = before and middle + 1 or low, before and high or middle
        end
        table.insert(order, low, flow)
      else
        missed[flow] = (missed[flow] or 0) + 1
        if not member or missed[flow] + 1 > patience then head = head + 1 end
      end
    end
    return turns
  end

  return line
end
