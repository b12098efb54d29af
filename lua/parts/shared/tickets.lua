--[[
shared/tickets: the queue of one model's waiting requests, in fair order. shared/turns finds the tickets to be served.

A request that waits has a ticket. A flow is all tickets of one tenant in one priority class. Within a flow, tickets are
ordered by place: time of arrival plus `patience` times the request's size, which is the time that an engine needs for
what it does not hold of the prompt. So small requests go first, but a request is only overtaken by requests that arrive
within `patience` times its own size after it. Flows are ordered by priority class, then virtual time, then the place of
their first ticket. A flow's virtual time counts work in tokens: it grows when a ticket of the flow is served, by the
tokens that the engine has to compute for it. A class has a virtual time, too, which grows by each served work divided
by the number of waiting flows; a flow that begins to wait starts there. So every waiting flow gets the same work done,
however much it asks for, and whether or not its requests are cancelled. A flow whose engine is busy falls behind its
class; when it is served, its lag is cut to the larger of `lag` (a second of an engine's work, decide/wait_turn) and the
largest work that was served lately. So a tenant that begins to wait is served after each other waiting tenant has got
at most that much work, and one request, more.

Guarantee: a ticket is a lease, which its replica must renew. An empty queue leaves nothing but the marks of displaced
tickets, which are leases, too. If one of the keys is lost, the queue begins anew: every waiting request gets a new
ticket at its old place. A ticket of a client with limits counts as one of its requests in flight, and its prompt as
used tokens; both end with the ticket.
Takes the key `queue2`, the time in us, the lifetime of a ticket (ms), the key prefix (nil: tickets do not count for
clients), and own_call, used in place of redis.call (decide/dry_tickets; nil: redis.call). Returns the functions
below, now_ms, and DISPLACED, the record of a ticket whose place another request took.
Keys: queue2 (ordered by text: flow, place, id), and with a suffix to that name:
  :tickets  id -> record (parts/layout; empty: displaced)         :leases   id -> expiry in ms
  :flows    place of its first ticket, flow -> class * 2^44 + virtual time
  :lengths  flow -> class * 2^20 + number of tickets
  :served   flow -> as in :flows; for flows without tickets whose virtual time is ahead of their class
  :clock    class -> its virtual time; class and `largest` -> the largest work served lately; `work_us` -> sum of the
            sizes of all tickets in us; `limit_us` -> see limit_s
--]]
local sub, format, pack, unpack_from = string.sub, string.format, struct.pack, struct.unpack
local CLASS, LENGTH = 2 ^ 44, 2 ^ 20 -- distance between priority classes in the scores of :flows and of :lengths
local FIRST_CLASS = 65 -- the letter A
local PAGE_TICKETS = 8 -- most tickets of a flow that are read at once
local LAST_PLACE = 2 ^ 53 -- largest place: Lua computes exactly up to it
local FORGOTTEN = 0.0625 -- tokens by which `largest` falls for each token of work that is served later

return function(queue2_key, now_us, ticket_ms, prefix, own_call)
  local call = own_call or redis.call
  local tickets_key, expiries_key, flows_key = queue2_key .. ":tickets", queue2_key .. ":leases", queue2_key .. ":flows"
  local lengths_key, served_key, clock_key = queue2_key .. ":lengths", queue2_key .. ":served", queue2_key .. ":clock"
  local now = now_us / 1000
  local queue = { DISPLACED = "", now_ms = math.floor(now) }

  local function class_of(flow) return (flow:byte(1) - FIRST_CLASS) * CLASS end
  local function exact(number) return format("%.0f", number) end
  -- Return the virtual time of a flow's class: each flow of the class begins there or later.
  local function floor_of(flow) return tonumber(call("HGET", clock_key, sub(flow, 1, 1))) or class_of(flow) end

  local function flow_of(ticket) return sub(ticket, TICKET_FLOW_AT, TICKET_ARRIVAL_AT - 1) end

  function queue.flow(priority, tenant) return string.char(FIRST_CLASS + priority) .. tenant end
  function queue.length(flow) return (tonumber(call("ZSCORE", lengths_key, flow)) or 0) % LENGTH end
  function queue.waiting() return call("ZCARD", queue2_key) end
  function queue.work_us() return math.max(0, tonumber(call("HGET", clock_key, "work_us")) or 0) end
  -- Return the longest prefill in seconds that an engine may have booked while requests wait: the highest limit of all
  -- replicas that have asked since the queue was empty. If each replica used its own limit, the one with the highest
  -- would serve all its own requests before the first ticket of another replica.
  function queue.limit_s(own_s)
    local own_us, known_us = math.floor(own_s * US), tonumber(call("HGET", clock_key, "limit_us")) or 0
    if own_us > known_us and queue.waiting() > 0 then call("HSET", clock_key, "limit_us", exact(own_us)) end
    return math.max(own_s, known_us / US)
  end
  -- Estimate the work in us that is served before a ticket of this flow and size. While a flow's tickets are served,
  -- each other flow of its class gets as much work, so the length of the own flow counts, not those of the others.
  function queue.ahead_us(flow, size_us)
    local others_us, others = queue.work_us() - size_us, queue.waiting() - 1
    local class = class_of(flow)
    if others_us <= 0 or others < 1 then return 0 end
    local own = math.max(1, queue.length(flow))
    local before = own * call("ZCOUNT", flows_key, exact(class), "(" .. exact(class + CLASS)) - 1
    return others_us * math.min(1, before / others)
  end
  function queue.find(id) return call("HGET", tickets_key, id) end
  -- Return the client of a ticket, nil if it has no limits.
  local function client_of(id)
    return prefix and #id >= CLIENT_AT and (include "shared/client_use")(prefix, id, now) or nil
  end
  function queue.renew(id)
    call("ZADD", expiries_key, "XX", exact(now + ticket_ms), id)
    local client = client_of(id)
    if client then client.hold(now + ticket_ms) end
  end

  local function member_of(id, ticket)
    return flow_of(ticket) .. sub(ticket, TICKET_PLACE_AT, TICKET_OWN_AT - 1) .. id
  end
  -- Return a flow's member of :flows, which begins with the place of its first ticket; nil if the flow has no ticket.
  local function place_of(flow)
    local first = call("ZRANGEBYLEX", queue2_key, "[" .. flow, "(" .. flow .. "\255", "LIMIT", 0, 1)[1]
    return first and sub(first, FLOW_BYTES + 1, FLOW_BYTES + PLACE_BYTES) .. flow
  end
  local function move(flow, before, time)
    local after = place_of(flow)
    if before and before ~= after then call("ZREM", flows_key, before) end
    if after then call("ZADD", flows_key, exact(time), after) end
    return after
  end

  -- Write a ticket. wish: the waiting request, as in decide/wait_turn. The larger its size, the later its place.
  local function write(id, flow, arrival_us, wish)
    local place = format("%016.0f", math.min(arrival_us + wish.patience * wish.size_us, LAST_PLACE))
    local prices = pack(TICKET_PRICES, wish.tokens, wish.size_us, wish.tie_us, wish.rest_us, #wish.named)
    local record = { prices, flow, format("%016.0f", arrival_us), place }
    for k, own in ipairs(wish.named) do record[4 + k] = pack(TICKET_OWN, own.slot, own.us) end
    record[#record + 1] = wish.barred
    call("ZADD", queue2_key, 0, flow .. place .. id)
    call("HSET", tickets_key, id, table.concat(record))
  end

  function queue.enter(id, flow, wish)
    local before = place_of(flow)
    local time = before and call("ZSCORE", flows_key, before) or call("ZSCORE", served_key, flow) or 0
    write(id, flow, now_us - wish.waited_ms * 1000, wish)
    call("ZADD", expiries_key, exact(now + ticket_ms), id)
    call("HINCRBY", clock_key, "work_us", wish.size_us)
    if not before then
      time = math.max(floor_of(flow), tonumber(time))
      call("ZREM", served_key, flow)
      call("ZADD", lengths_key, (flow:byte(1) - FIRST_CLASS) * LENGTH, flow)
    end
    call("ZINCRBY", lengths_key, 1, flow)
    move(flow, before, time)
    local client = client_of(id)
    if client then
      client.hold(now + ticket_ms)
      client.spend(wish.tokens, wish.per_minute)
    end
  end

  -- Rewrite a ticket with new prices (seconds that each worker needs to compute the prompt), because caches change.
  function queue.review(id, ticket, wish)
    local flow = flow_of(ticket)
    local before = place_of(flow)
    local time = before and call("ZSCORE", flows_key, before)
    if #ticket < TICKET_OWN_AT - 1 or not time then return end -- a key of the queue is lost: the queue begins anew
    call("ZREM", queue2_key, member_of(id, ticket))
    local _, size_us = unpack_from(TICKET_SIZE, ticket)
    if size_us ~= wish.size_us then call("HINCRBY", clock_key, "work_us", exact(wish.size_us - size_us)) end
    write(id, flow, sub(ticket, TICKET_ARRIVAL_AT, TICKET_PLACE_AT - 1), wish)
    move(flow, before, tonumber(time))
  end

  -- Return the largest work that was served lately in the class of a flow, now that `done` is served.
  local function largest_work(flow, done)
    local field = sub(flow, 1, 1) .. "largest"
    local before = tonumber(call("HGET", clock_key, field)) or 0
    local largest = math.max(done, math.floor(before - FORGOTTEN * done))
    if largest ~= before then call("HSET", clock_key, field, exact(largest)) end
    return largest
  end

  -- Take a ticket out. done: tokens of work for which it was served; nil if it was not served. lag: tokens of work that
  -- its flow may be behind its class afterwards (or the largest recent work, if that is more).
  function queue.leave(id, done, lag)
    local ticket = queue.find(id)
    call("HDEL", tickets_key, id)
    call("ZREM", expiries_key, id)
    if not ticket or ticket == queue.DISPLACED then return end
    local client = client_of(id)
    if client then
      client.let_go()
      client.spend(-unpack_from(TICKET_TOKENS, ticket))
    end
    local flow = flow_of(ticket)
    local before, class = place_of(flow), class_of(flow)
    local time = tonumber(before and call("ZSCORE", flows_key, before)) or class
    local stands = floor_of(flow)
    if done then
      local share = done / call("ZCOUNT", flows_key, exact(class), "(" .. exact(class + CLASS))
      stands = math.min(math.max(stands, time) + math.ceil(share), class + CLASS - 1)
      time = math.max(time + done, stands - math.max(lag, largest_work(flow, done)))
      time = math.min(time, class + CLASS - 1)
      call("HSET", clock_key, sub(flow, 1, 1), exact(stands))
      call("ZREMRANGEBYSCORE", served_key, exact(class), exact(stands)) -- flows behind their class begin at its time
    end
    call("ZREM", queue2_key, member_of(id, ticket))
    local _, size_us = unpack_from(TICKET_SIZE, ticket)
    call("HINCRBY", clock_key, "work_us", exact(-size_us))
    call("ZINCRBY", lengths_key, -1, flow)
    if not move(flow, before, time) then
      call("ZREM", lengths_key, flow)
      if time > stands then call("ZADD", served_key, exact(time), flow) end
    end
    if queue.waiting() == 0 then call("UNLINK", served_key, clock_key) end
  end

  -- A Redis that evicts keys may delete one of the queue's keys alone, so that orders or expiries of tickets are lost.
  function queue.begin_anew_if_a_part_is_lost()
    local members, records, lines = queue.waiting(), call("HLEN", tickets_key), call("ZCARD", flows_key)
    if records ~= call("ZCARD", expiries_key) or members > records or lines ~= call("ZCARD", lengths_key)
        or (members == 0) ~= (lines == 0) then
      call("UNLINK", queue2_key, tickets_key, expiries_key, flows_key, lengths_key, served_key, clock_key)
    end
  end

  function queue.reap(most)
    local expired = call("ZRANGEBYSCORE", expiries_key, "-inf", exact(now), "LIMIT", 0, most)
    for _, id in ipairs(expired) do queue.leave(id) end
    -- After the clock stepped back, tickets of dead replicas would expire too late, so their expiry is set anew.
    local ahead = call("ZRANGEBYSCORE", expiries_key, "(" .. exact(now + ticket_ms), "+inf", "LIMIT", 0, most)
    for _, id in ipairs(ahead) do queue.renew(id) end
  end

  -- Displace the last ticket of the longest flow of the last class, for a new ticket in a full queue; not if the new
  -- ticket's flow is that flow or would be as long. So a tenant that fills the queue shuts out nobody but itself.
  function queue.displace(flow)
    local longest = call("ZREVRANGE", lengths_key, 0, 0, "WITHSCORES")
    local own = tonumber(call("ZSCORE", lengths_key, flow)) or (flow:byte(1) - FIRST_CLASS) * LENGTH
    if not longest[1] or tonumber(longest[2]) <= own + 1 then return false end
    local last = call("ZREVRANGEBYLEX", queue2_key, "(" .. longest[1] .. "\255", "[" .. longest[1], "LIMIT", 0, 1)[1]
    if not last then return false end
    local id = sub(last, MEMBER_ID_AT)
    queue.leave(id)
    call("HSET", tickets_key, id, queue.DISPLACED) -- the ticket's replica learns it from its next poll
    call("ZADD", expiries_key, exact(now + ticket_ms), id)
    return true
  end

  -- Return the id and the record of the ticket that is first in order; nil if none waits.
  function queue.first()
    local flow = sub(call("ZRANGE", flows_key, 0, 0)[1] or "", PLACE_BYTES + 1)
    local member = call("ZRANGEBYLEX", queue2_key, "[" .. flow, "(" .. flow .. "\255", "LIMIT", 0, 1)[1]
    local id = member and sub(member, MEMBER_ID_AT)
    return id, id and queue.find(id)
  end

  function queue.flows() return call("ZCARD", flows_key) end
  -- Return the flows in order, from the first-th on, counted from 0: each as its member of :flows, then its score.
  function queue.line(first, count) return call("ZRANGE", flows_key, first, first + count - 1, "WITHSCORES") end
  -- Return the ids and records of up to PAGE_TICKETS tickets of a flow from the k-th on, counted from 0.
  function queue.page(flow, k)
    local first = call("ZLEXCOUNT", queue2_key, "-", "(" .. flow) + k
    local ids = call("ZRANGE", queue2_key, first, first + PAGE_TICKETS - 1)
    for m = 1, #ids do ids[m] = sub(ids[m], 1, FLOW_BYTES) == flow and sub(ids[m], MEMBER_ID_AT) or nil end
    local records = ids[1] and call("HMGET", tickets_key, unpack(ids))
    return { at = k, beyond = k + PAGE_TICKETS, ids = ids, records = records }
  end
  -- Return the rank of a ticket in a flow, counted from 0; nil if the flow has no such ticket.
  function queue.rank_in(flow, id)
    local ticket = queue.find(id)
    local rank = ticket and flow_of(ticket) == flow and call("ZRANK", queue2_key, member_of(id, ticket))
    return rank and rank - call("ZLEXCOUNT", queue2_key, "-", "(" .. flow)
  end
  -- Return the rank of a ticket's flow among the flows, counted from 0.
  function queue.rank_of_flow(id)
    local ticket = queue.find(id)
    local place = ticket and place_of(flow_of(ticket))
    return place and call("ZRANK", flows_key, place)
  end

  return queue
end
