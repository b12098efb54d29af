--[[
shared/fair_queue: the waiting requests of one model, in fair order, and whose turn it is.

A request that waits has a ticket. A flow is one tenant in one priority class. Within a flow the order is that of the
tickets' places: a place is the time of arrival plus `patience` times the request's size, the time that an engine needs
for what it does not hold of the prompt. So small work goes first, and nobody is overtaken by requests that come later
than `patience` times its own size after it. Between flows the order is: priority class, then the flow's virtual time,
then the place of its first ticket. Virtual
time is work in tokens: it moves on when a ticket of the flow is served, by what the engine has to do for it. A flow
that begins to wait begins where its class stands; the class moves on by each served work divided among the flows that
wait. So every flow that waits gets the same work done, however much it asks for and whatever of that is given up.
A flow whose engine is busy falls behind its class, but once it is served no further than a bound: the larger of `lag`
(a second of an engine's work, decide/wait_turn) and the largest work that was served lately. So a tenant that begins
to wait stands behind each of those who wait for the same engine by no more than that, and one more request.

Guarantee: a ticket is a lease: a replica that does not renew it loses it. An empty queue leaves nothing but the marks
of displaced tickets, which are leases, too. If one of the keys is lost, the queue begins anew: every request that waits
takes a new ticket, at its old place.
A ticket of a client with limits counts as one of its requests in flight, and its prompt as used; both are given back
with the ticket.
Takes the key `queue2`, the time in us, how long a ticket lives (ms), the key prefix (nil: tickets do not count
as a client's), and own_call, which stands for redis.call (decide/dry_queue; nil: that itself). Returns the functions
below and DISPLACED, the record of a ticket whose place another request took.
Keys: queue2 (lexical: flow, place, id), and under its name :tickets (id -> prices, flow, arrival, place, prices of
named workers (decide/prices), slots of workers that cannot serve it; empty: displaced), :leases (id -> expiry ms),
:flows (place of its first ticket, flow -> class * 2^44 + virtual time), :lengths (flow -> class * 2^20 + tickets),
:served (flow -> as in :flows, of flows without tickets that are ahead of their class), :clock (class -> where it
stands; class and `largest` -> the largest work served lately; `work_us` -> the sizes of all tickets in us; `limit_us`
-> the most prefill that a replica gives engines ahead, of those that asked while somebody waited).
--]]
local sub, format, unpack_from = string.sub, string.format, struct.unpack
local CLASS, LENGTH = 2 ^ 44, 2 ^ 20 -- from one priority class to the next, in :flows and in :lengths
local FIRST_CLASS, PAGE_TICKETS = 65, 8 -- the letter A; tickets of a flow that are read at once
local LAST_PLACE = 2 ^ 53 -- the largest of PLACE_BYTES digits that is exact
local FORGOTTEN = 0.0625 -- of the largest work, for each token of work that is served after it
local GOLDEN_RATIO = 0.6180339887 -- its multiples spread evenly between whole numbers

return function(queue_key, now_us, ticket_ms, prefix, own_call)
  local call = own_call or redis.call
  local tickets, leases, flows = queue_key .. ":tickets", queue_key .. ":leases", queue_key .. ":flows"
  local lengths, served, clock = queue_key .. ":lengths", queue_key .. ":served", queue_key .. ":clock"
  local queue, now = { DISPLACED = "" }, now_us / 1000

  local function class_of(flow) return (flow:byte(1) - FIRST_CLASS) * CLASS end
  local function exact(number) return format("%.0f", number) end
  -- Where the class of a flow stands: no flow begins before it.
  local function floor_of(flow) return tonumber(call("HGET", clock, sub(flow, 1, 1))) or class_of(flow) end

  local function length_of(flow) return (tonumber(call("ZSCORE", lengths, flow)) or 0) % LENGTH end

  function queue.flow(priority, tenant) return string.char(FIRST_CLASS + priority) .. tenant end
  function queue.waiting() return call("ZCARD", queue_key) end
  function queue.work_us() return math.max(0, tonumber(call("HGET", clock, "work_us")) or 0) end
  -- Seconds of prefill that engines get ahead while somebody waits: the most of what the replicas that ask would give.
  -- With a limit of its own each would see other turns: the one with more room would serve all its requests before the
  -- first ticket of another one.
  function queue.limit_s(own_s)
    local own_us, known_us = math.floor(own_s * US), tonumber(call("HGET", clock, "limit_us")) or 0
    if own_us > known_us and queue.waiting() > 0 then call("HSET", clock, "limit_us", exact(own_us)) end
    return math.max(own_s, known_us / US)
  end
  -- us of work that is served before a ticket of this flow and size, about. While the tickets of a flow are served,
  -- each other flow of its class gets as much: a tenant's own line counts, and not how many requests of others wait.
  function queue.ahead_us(flow, size_us)
    local others_us, others, class = queue.work_us() - size_us, queue.waiting() - 1, class_of(flow)
    if others_us <= 0 or others < 1 then return 0 end
    local own = math.max(1, length_of(flow))
    local before = own * call("ZCOUNT", flows, exact(class), "(" .. exact(class + CLASS)) - 1
    return others_us * math.min(1, before / others)
  end
  function queue.find(id) return call("HGET", tickets, id) end
  -- The client of a ticket, nil if it has no limits.
  local function client_of(id)
    return prefix and #id >= CLIENT_AT and (include "shared/client_use")(prefix, id, now) or nil
  end
  function queue.renew(id)
    call("ZADD", leases, "XX", exact(now + ticket_ms), id)
    local client = client_of(id)
    if client then client.hold(now + ticket_ms) end
  end

  -- A ticket's member of the queue.
  local function member_of(id, ticket)
    return sub(ticket, TICKET_FLOW_AT, TICKET_ARRIVAL_AT - 1) .. sub(ticket, TICKET_PLACE_AT, TICKET_OWN_AT - 1) .. id
  end
  -- The first ticket of a flow tells its place among flows of the same time.
  local function place_of(flow)
    local first = call("ZRANGEBYLEX", queue_key, "[" .. flow, "(" .. flow .. "\255", "LIMIT", 0, 1)[1]
    return first and sub(first, FLOW_BYTES + 1, FLOW_BYTES + PLACE_BYTES) .. flow
  end
  local function move(flow, before, time)
    local after = place_of(flow)
    if before and before ~= after then call("ZREM", flows, before) end
    if after then call("ZADD", flows, exact(time), after) end
    return after
  end

  -- wish: of the request that waits, as decide/wait_turn makes it.
  local function write(id, flow, arrival_us, wish)
    local place = format("%016.0f", math.min(arrival_us + wish.patience * wish.size_us, LAST_PLACE))
    call("ZADD", queue_key, 0, flow .. place .. id)
    local times = format("%016.0f", arrival_us) .. place
    call("HSET", tickets, id, wish.prices .. flow .. times .. wish.named .. wish.barred)
  end

  function queue.enter(id, flow, wish)
    local before = place_of(flow)
    local time = before and call("ZSCORE", flows, before) or call("ZSCORE", served, flow) or 0
    write(id, flow, now_us - wish.waited_ms * 1000, wish)
    call("ZADD", leases, exact(now + ticket_ms), id)
    call("HINCRBY", clock, "work_us", wish.size_us)
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
      client.spend(wish.tokens, wish.per_minute)
    end
  end

  -- The ticket as the request is by now: more or less of its prompt may be held somewhere than when it was written.
  function queue.review(id, ticket, wish)
    local flow = sub(ticket, TICKET_FLOW_AT, TICKET_ARRIVAL_AT - 1)
    local before = place_of(flow)
    local time = before and call("ZSCORE", flows, before)
    if #ticket < TICKET_OWN_AT - 1 or not time then return end -- a part of the queue is lost, and this ticket with it
    call("ZREM", queue_key, member_of(id, ticket))
    local _, size_us = unpack_from(TICKET_SIZE, ticket)
    if size_us ~= wish.size_us then call("HINCRBY", clock, "work_us", exact(wish.size_us - size_us)) end
    write(id, flow, sub(ticket, TICKET_ARRIVAL_AT, TICKET_PLACE_AT - 1), wish)
    move(flow, before, tonumber(time))
  end

  -- The largest work that was served lately in the class of a flow, of which one part is `done`.
  local function largest_work(flow, done)
    local field = sub(flow, 1, 1) .. "largest"
    local before = tonumber(call("HGET", clock, field)) or 0
    local largest = math.max(done, math.floor(before - FORGOTTEN * done))
    if largest ~= before then call("HSET", clock, field, exact(largest)) end
    return largest
  end

  -- Take a ticket out. done: the work that it was served with, nil if it was not served. lag: so much work may its flow
  -- be behind its class afterwards, or as much as the largest work.
  function queue.leave(id, done, lag)
    local ticket = queue.find(id)
    call("HDEL", tickets, id)
    call("ZREM", leases, id)
    if not ticket or ticket == queue.DISPLACED then return end
    local client = client_of(id)
    if client then
      client.let_go()
      client.spend(-unpack_from(TICKET_TOKENS, ticket))
    end
    local flow = sub(ticket, TICKET_FLOW_AT, TICKET_ARRIVAL_AT - 1)
    local before, class = place_of(flow), class_of(flow)
    local time, stands = tonumber(before and call("ZSCORE", flows, before)) or class, floor_of(flow)
    if done then
      local share = done / call("ZCOUNT", flows, exact(class), "(" .. exact(class + CLASS))
      stands = math.min(math.max(stands, time) + math.ceil(share), class + CLASS - 1)
      time = math.max(time + done, stands - math.max(lag, largest_work(flow, done)))
      time = math.min(time, class + CLASS - 1)
      call("HSET", clock, sub(flow, 1, 1), exact(stands))
      call("ZREMRANGEBYSCORE", served, exact(class), exact(stands)) -- a flow begins at the time of its class anyway
    end
    call("ZREM", queue_key, member_of(id, ticket))
    local _, size_us = unpack_from(TICKET_SIZE, ticket)
    call("HINCRBY", clock, "work_us", exact(-size_us))
    call("ZINCRBY", lengths, -1, flow)
    if not move(flow, before, time) then
      call("ZREM", lengths, flow)
      if time > stands then call("ZADD", served, exact(time), flow) end
    end
    if queue.waiting() == 0 then call("UNLINK", served, clock) end
  end

  -- A Redis that evicts keys may take one of these alone. Then nobody can tell whose turn it is, or who is dead.
  function queue.begin_anew_if_a_part_is_lost()
    local members, records, lines = queue.waiting(), call("HLEN", tickets), call("ZCARD", flows)
    if records ~= call("ZCARD", leases) or members > records or lines ~= call("ZCARD", lengths)
        or (members == 0) ~= (lines == 0) then
      call("UNLINK", queue_key, tickets, leases, flows, lengths, served, clock)
    end
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

  -- The ticket that is first in order, as lua/queue.lua tells it. left: shared/room_left.
  function queue.first(left)
    local flow = sub(call("ZRANGE", flows, 0, 0)[1] or "", PLACE_BYTES + 1)
    local member = call("ZRANGEBYLEX", queue_key, "[" .. flow, "(" .. flow .. "\255", "LIMIT", 0, 1)[1]
    local id = member and sub(member, MEMBER_ID_AT)
    local ticket = id and queue.find(id)
    if not ticket or #ticket < TICKET_OWN_AT - 1 then return {} end
    local tokens, size_us = unpack_from(TICKET_SIZE, ticket)
    local waited_ms = math.floor(now - sub(ticket, TICKET_ARRIVAL_AT, TICKET_PLACE_AT - 1) / 1000)
    local worker, is_turn, any_room, own_us = left.stands(ticket)
    return { id, tokens, size_us, waited_ms, call("ZCARD", flows), worker, is_turn and 1 or 0, any_room and 1 or 0,
      own_us }
  end

  -- Up to PAGE_TICKETS tickets of a flow from the k-th on, counted from 0: their ids and records.
  local function page_of(flow, k)
    local first = call("ZLEXCOUNT", queue_key, "-", "(" .. flow) + k
    local ids = call("ZRANGE", queue_key, first, first + PAGE_TICKETS - 1)
    for m = 1, #ids do ids[m] = sub(ids[m], 1, FLOW_BYTES) == flow and sub(ids[m], MEMBER_ID_AT) or nil end
    return { at = k, ids = ids, records = ids[1] and call("HMGET", tickets, unpack(ids)) }
  end
  -- Where to go on in a line of `length` whose first k were looked at in vain: at a place that moves with the clock, so
  -- that all are looked at by and by; if rank is given, so far behind that this one is the last of `most`.
  local function further(length, k, most, rank)
    if rank then return math.max(k, rank + 1 - most) end
    local part = math.floor(math.ceil((length - k) / most) * (math.floor(now) * GOLDEN_RATIO % 1))
    return k + math.max(0, math.min(part * most, length - k - most))
  end
  -- As `further` says: in the tickets of a flow, for the ticket `last`; and in the flows, for the flow of that ticket.
  local function further_ticket(flow, k, most, last)
    local ticket = last and queue.find(last)
    local rank = ticket and sub(ticket, TICKET_FLOW_AT, TICKET_ARRIVAL_AT - 1) == flow
      and call("ZRANK", queue_key, member_of(last, ticket))
    if rank then rank = rank - call("ZLEXCOUNT", queue_key, "-", "(" .. flow) end
    return further(length_of(flow), k, most, rank)
  end
  local function further_flow(k, most, last)
    local ticket = last and queue.find(last)
    local place = ticket and place_of(sub(ticket, TICKET_FLOW_AT, TICKET_ARRIVAL_AT - 1))
    return further(call("ZCARD", flows), k, most, place and call("ZRANK", flows, place))
  end

  -- A flow takes its new place in the order, from `head` on: that stays sorted.
  local function put_back(order, head, score, flow)
    local low, high = head, #order + 1
    while low < high do
      local middle = math.floor((low + high) / 2)
      local at = order[middle]
      local before = score[at] < score[flow] or score[at] == score[flow] and at < flow
      low, high = before and middle + 1 or low, before and high or middle
    end
    table.insert(order, low, flow)
  end

  -- Whose turn it is: the ids of tickets, in order, as long as workers have room (shared/room_left). A ticket whose
  -- cheapest workers are all busy is passed over, as is one that none of the workers with room can serve. `most`
  -- tickets are looked at, of which each flow may use up an equal part on tickets that are passed over, two at least:
  -- half of it at its front and half further back. So a tenant whose worker is busy delays no other tenant, nor all of
  -- its own requests for other workers. Where that is too little for all flows, the looks go on at flows further back
  -- as soon as half of them were in vain. last: stop at this id. Returns id -> candidate.
  function queue.turns(left, most, last)
    local turns, order, head, score, pages, place, missed = {}, {}, 1, {}, {}, {}, {}
    local seen, in_vain, go_on_at = 0, 0, 0
    local function read(first, count)
      local found = call("ZRANGE", flows, first, first + count - 1, "WITHSCORES")
      order, head, go_on_at = {}, 1, first + count
      for k = 1, #found, 2 do order[#order + 1], score[found[k]] = found[k], tonumber(found[k + 1]) end
    end
    if left.any() then read(0, most) end
    local misses_each = math.max(2, math.floor(most / #order))
    local more = #order * misses_each > most
    for looked = 1, most do
      if more and head > #order then read(go_on_at, most - looked + 1) end
      local flow = order[head]
      if not flow or turns[last] or not left.any() then break end
      local k, name, page = place[flow] or 0, sub(flow, PLACE_BYTES + 1), pages[flow]
      if not page or k < page.at or k >= page.at + PAGE_TICKETS then
        page = page_of(name, k)
        pages[flow] = page
      end
      local id = page.ids[k - page.at + 1]
      local ticket = id and page.records[k - page.at + 1]
      local worker, work
      if ticket and #ticket >= TICKET_OWN_AT - 1 then worker, work = left.take(ticket) end
      seen, place[flow] = place[flow] and seen or seen + 1, k + 1
      if worker then
        turns[id], score[flow], head = worker, score[flow] + math.max(work, 1), head + 1 -- as when it is served
        put_back(order, head, score, flow)
      else
        local misses, rest = (missed[flow] or 0) + 1, most - looked
        missed[flow], in_vain = misses, in_vain + 1
        if more and in_vain == math.floor(most / 2) and rest > 0 then
          read(further_flow(seen, math.max(1, math.floor(rest / misses_each)), last), rest)
        elseif not id or misses >= misses_each then
          head = head + 1
        elseif misses == math.floor(misses_each / 2) then
          place[flow] = further_ticket(name, k + 1, math.min(misses_each - misses, rest), last)
          if place[flow] >= length_of(name) then head = head + 1 end
        end
      end
    end
    return turns
  end

  return queue
end
