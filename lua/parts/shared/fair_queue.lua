--[[
shared/fair_queue: the waiting requests of one model, in fair order, and whose turn it is.

A request that waits has a ticket. A flow is one tenant in one priority class; its tickets wait in the order they came.
Between flows the order is: priority class, then the flow's virtual time, then the arrival of its first ticket. Virtual
time is work in tokens: it moves on when a ticket of the flow is served, by what the engine has to do for it. A flow
that begins to wait begins where its class stands; the class moves on by each served work divided among the flows that
wait. So every flow that waits gets the same work done, however much it asks for and whatever of that is given up.

Guarantee: a ticket is a lease: a replica that does not renew it loses it. An empty queue leaves nothing but the marks
of displaced tickets, which are leases, too. If one of the keys is lost, its tickets are lost and nothing fails.
A ticket of a client with limits counts as one of its requests in flight, and its prompt as used; both are given back
with the ticket.
Takes the key `queue`, the time in us, how long a ticket lives (ms), and the key prefix. Returns the functions below and
DISPLACED, the record of a ticket whose place another request took.
Keys: queue (lexical: flow, arrival, id), and under its name :tickets (id -> tokens, flow, arrival, ids of workers that
cannot serve it; empty: displaced), :leases (id -> expiry ms), :flows (arrival of its first ticket, flow -> class *
2^44 + virtual time), :lengths (flow -> class * 2^20 + tickets), :served (flow -> as in :flows, of flows without
tickets that are ahead of their class), :clock (class -> where it stands; `tokens` -> prompt tokens of all tickets).
--]]
local call, sub, format, unpack_from = redis.call, string.sub, string.format, struct.unpack
local CLASS, LENGTH = 2 ^ 44, 2 ^ 20 -- from one priority class to the next, in :flows and in :lengths
local FLOW_BYTES, ARRIVAL_BYTES, MEMBER_ID_AT = 9, 16, 26 -- of a member of `queue`: flow, arrival, id
local TICKET_TOKENS, TICKET_FLOW_AT, TICKET_BARRED_AT = ">I4", 5, 30 -- of a ticket: tokens, flow, arrival, barred
local FIRST_CLASS, PAGE, CLIENT_AT = 65, 8, 26 -- the letter A; tickets of a flow that are read at once; of an id

return function(queue_key, now_us, ticket_ms, prefix)
  local tickets, leases, flows = queue_key .. ":tickets", queue_key .. ":leases", queue_key .. ":flows"
  local lengths, served, clock = queue_key .. ":lengths", queue_key .. ":served", queue_key .. ":clock"
  local queue, now = { DISPLACED = "" }, now_us / 1000

  local function class_of(flow) return (flow:byte(1) - FIRST_CLASS) * CLASS end
  local function exact(number) return format("%.0f", number) end
  -- Where the class of a flow stands: no flow begins before it.
  local function floor_of(flow) return tonumber(call("HGET", clock, sub(flow, 1, 1))) or class_of(flow) end

  function queue.flow(priority, tenant) return string.char(FIRST_CLASS + priority) .. tenant end
  function queue.waiting() return call("ZCARD", queue_key) end
  function queue.tokens() return tonumber(call("HGET", clock, "tokens")) or 0 end
  function queue.find(id) return call("HGET", tickets, id) end
  -- The client of a ticket, nil if it has no limits.
  local function client_of(id) return #id >= CLIENT_AT and (include "shared/client_use")(prefix, id, now) or nil end
  function queue.renew(id)
    call("ZADD", leases, "XX", exact(now + ticket_ms), id)
    local client = client_of(id)
    if client then client.hold(now + ticket_ms) end
  end

  -- The first ticket of a flow tells its place among flows of the same time.
  local function place_of(flow)
    local first = call("ZRANGEBYLEX", queue_key, "[" .. flow, "(" .. flow .. "\255", "LIMIT", 0, 1)[1]
    return first and sub(first, FLOW_BYTES + 1, FLOW_BYTES + ARRIVAL_BYTES) .. flow
  end
  local function move(flow, before, time)
    local after = place_of(flow)
    if before and before ~= after then call("ZREM", flows, before) end
    if after then call("ZADD", flows, exact(time), after) end
    return after
  end

  function queue.enter(id, flow, tokens, barred, waited_ms, per_minute)
    local before, member = place_of(flow), flow .. format("%016.0f", now_us - waited_ms * 1000) .. id
    local time = before and call("ZSCORE", flows, before) or call("ZSCORE", served, flow) or 0
    call("ZADD", queue_key, 0, member)
    call("HSET", tickets, id, struct.pack(TICKET_TOKENS, tokens) .. sub(member, 1, MEMBER_ID_AT - 1) .. barred)
    call("ZADD", leases, exact(now + ticket_ms), id)
    call("HINCRBY", clock, "tokens", tokens)
    if not before then
      time = math.max(floor_of(flow), tonumber(time))
      call("ZREM", served, flow)
      call("ZADD", lengths, (flow:byte(1) - FIRST_CLASS) * LENGTH, flow)
    end
    call("ZINCRBY", lengths, 1, flow)
    move(flow, before, time)
    local client = client_of(id)
    if client then
      client.hold(now + ticket_ms)
      client.spend(tokens, per_minute)
    end
  end

  -- Take a ticket out. done: the work that it was served with, nil if it was not served.
  function queue.leave(id, done)
    local ticket = queue.find(id)
    call("HDEL", tickets, id)
    call("ZREM", leases, id)
    if not ticket or ticket == queue.DISPLACED then return end
    local client = client_of(id)
    if client then
      client.let_go()
      client.spend(-unpack_from(TICKET_TOKENS, ticket))
    end
    local flow = sub(ticket, TICKET_FLOW_AT, TICKET_FLOW_AT + FLOW_BYTES - 1)
    local before, class = place_of(flow), class_of(flow)
    local time, stands = tonumber(before and call("ZSCORE", flows, before)) or class, floor_of(flow)
    if done then
      local share = done / call("ZCOUNT", flows, exact(class), "(" .. exact(class + CLASS))
      stands = math.min(math.max(stands, time) + math.ceil(share), class + CLASS - 1)
      time = math.min(time + done, class + CLASS - 1)
      call("HSET", clock, sub(flow, 1, 1), exact(stands))
      call("ZREMRANGEBYSCORE", served, exact(class), exact(stands)) -- a flow begins at the time of its class anyway
    end
    call("ZREM", queue_key, sub(ticket, TICKET_FLOW_AT, TICKET_BARRED_AT - 1) .. id)
    call("HINCRBY", clock, "tokens", -unpack_from(TICKET_TOKENS, ticket))
    call("ZINCRBY", lengths, -1, flow)
    if not move(flow, before, time) then
      call("ZREM", lengths, flow)
      if time > stands then call("ZADD", served, exact(time), flow) end
    end
    if queue.waiting() == 0 then call("UNLINK", served, clock) end
  end

  function queue.reap(most)
    for _, id in ipairs(call("ZRANGEBYSCORE", leases, "-inf", exact(now), "LIMIT", 0, most)) do queue.leave(id) end
    -- After the clock stepped back, tickets of dead replicas would expire too late. They get an expiry that counts from
    -- now.
    local ahead = call("ZRANGEBYSCORE", leases, "(" .. exact(now + ticket_ms), "+inf", "LIMIT", 0, most)
    for _, id in ipairs(ahead) do queue.renew(id) end
  end

  -- The queue is full: the last ticket of the longest flow of the last class gives way, unless that flow is the
  -- newcomer's own or the newcomer's would be as long. So a tenant that fills the queue shuts out nobody but itself.
  function queue.displace(flow)
    local longest = call("ZREVRANGE", lengths, 0, 0, "WITHSCORES")
    local own = tonumber(call("ZSCORE", lengths, flow)) or (flow:byte(1) - FIRST_CLASS) * LENGTH
    if not longest[1] or tonumber(longest[2]) <= own + 1 then return false end
    local last = call("ZREVRANGEBYLEX", queue_key, "(" .. longest[1] .. "\255", "[" .. longest[1], "LIMIT", 0, 1)[1]
    if not last then return false end
    local id = sub(last, MEMBER_ID_AT)
    queue.leave(id)
    call("HSET", tickets, id, queue.DISPLACED) -- its replica is told when it asks
    call("ZADD", leases, exact(now + ticket_ms), id)
    return true
  end

  -- Whose turn it is: as many tickets, in order, as the capacity (shared/capacity) has room for, each counted by the
  -- tokens of its prompt. A ticket that none of the free workers can serve is passed over. `most` tickets are looked
  -- at, of which each flow may use up an equal part on tickets that cannot be served. So a tenant whose worker is
  -- busy delays no other tenant.
  function queue.turns(capacity, most)
    local turns, left, share = {}, capacity.tokens, capacity.tokens / math.max(capacity.count, 1)
    local order, head, score, ahead, place, missed = {}, 1, {}, {}, {}, {}
    if left <= 0 then return turns end
    local found = call("ZRANGE", flows, 0, most - 1, "WITHSCORES")
    for k = 1, #found, 2 do order[#order + 1], score[found[k]] = found[k], tonumber(found[k + 1]) end
    local patience = most / #order
    for _ = 1, most do
      local flow = order[head]
      if not flow or left <= 0 then break end
      local k, name = place[flow] or 0, sub(flow, ARRIVAL_BYTES + 1)
      if k % PAGE == 0 then
        ahead[flow] = call("ZRANGEBYLEX", queue_key, "[" .. name, "(" .. name .. "\255", "LIMIT", k, PAGE)
      end
      local member = ahead[flow][k % PAGE + 1]
      local id = member and sub(member, MEMBER_ID_AT)
      local ticket = id and queue.find(id)
      local tokens = ticket and #ticket >= TICKET_BARRED_AT - 1 and unpack_from(TICKET_TOKENS, ticket)
      place[flow] = k + 1
      if tokens and capacity.serves(sub(ticket, TICKET_BARRED_AT)) then
        turns[id], left, score[flow], head = true, left - math.min(tokens, share), score[flow] + tokens, head + 1
        -- The flow takes its new place among those that are left: they stay sorted.
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

  return queue
end
