--[[
decide/wait_turn: decides whether a request must wait in the queue. A request that must wait gets a ticket here, or an
answer that says why it has none.

decide calls it while tickets wait or the chosen engine has no room. Guarantee: while tickets wait, no request takes
room that an earlier ticket could use, of the 256 tickets that are looked at (shared/turns says which). While none
waits, a request waits only for an engine that is cheaper for it than all engines with room.
Takes the candidates of this request after the choice (decide/cost_rule), and the choice; the request; with_room
(decide/cost_rule); a function that returns the candidates of any request; and the keys of queue and leases. The
request: id, priority, tenant, tokens (of the prompt), barred (ids of workers that cannot serve it,
joined by commas), rows (of all workers), now_us, waited_ms, constants (of the replica), queue_max (most tickets of the
queue when this one enters; 0: the request gets no ticket, loses one that it has, and displaces none), displaces (in a
full queue it may take the place of another), prefix of the keys, per_minute (tokens, if its client has such a limit),
dry (nothing is written).
Sets s.turn_at (the candidate of the request's price) if it has a ticket, and s.room (seconds of room that waiting
requests leave over, by candidate) once it looks for such room.
Returns one of
  {QUEUED, FULL or DISPLACED (another request took its place, and no place is left), number of tickets, ms of work in
  them, price of the turn in seconds, tokens of the prompt that the worker of this price holds}
  nil, the candidate (the choice, or another if that has no room), and a function to call with the request's work in
  tokens once the request is booked
Price of the turn, at the worker for which the ticket waits (shared/turns): seconds to compute what that worker lacks of
the prompt, plus seconds that it is overdue, plus half of the wait for it and of the queue's work that is served before;
0 without a ticket. By this price routers compare pools, so a second of waiting counts half in every pool (WAIT_PRICE in
app/warmfleet/routing/pool_choice.py).
--]]
local call, floor, max, min = redis.call, math.floor, math.max, math.min
local tickets, turns, room_of_engines = include "shared/tickets", include "shared/turns", include "shared/room"
local NAMED, MAX_US = 8, 4294967295 -- most workers whose prices a ticket has; longest time in one of its fields
local WAIT_PRICE = 0.5 -- price of a second of waiting when pools are compared, in seconds of computing
local LAG_S = 1 -- longest lag of a served flow behind its class (shared/tickets), in seconds of an engine's work

-- Return the packed slots of the workers of these ids: a ticket stores slots, which are shorter than ids.
local function slots_of(ids, rows)
  local wanted, slots = {}, {}
  for id in ids:gmatch("[^,]+") do wanted[id] = true end
  for k = 1, next(wanted) and #rows or 0 do
    if wanted[rows[k]:sub(WORKER_ID_AT)] then slots[#slots + 1] = rows[k]:sub(SLOT_AT, SLOT_AT + SLOT_BYTES - 1) end
  end
  return table.concat(slots)
end

local function us(seconds) return floor(min(seconds * US, MAX_US) + 0.5) end

-- Return a price as a ticket has it (parts/layout), from seconds.
local function price_of(own_s, compute_s)
  local step = floor(us(own_s) / PRICE_STEP)
  return PRICE_STEP * step + floor((PRICE_STEP - 1) * compute_s / max(own_s, compute_s, 1 / US) + 0.5)
end

-- Price the request at each worker: seconds to compute what the worker does not hold of the prompt, and what the cost
-- rule adds for answers under way there, at most the seconds to compute the whole prompt. The other terms of the cost
-- rule are left out: they tell which worker with room is best, but in the queue they would leave engines idle.
-- A ticket stores the NAMED lowest prices with their workers, and one price for all other workers, the lowest of
-- theirs: so turns are found without a look at every worker.
-- Returns by candidate the prices and the seconds to compute, the least of the latter, the candidates of the lowest
-- prices, lowest first, and the candidate whose price is that of the others. The price is
-- infinite where the request cannot be served.
local function prices_of(s)
  local own_s, compute_s, size_s, named, dearest, decode_s = {}, {}, math.huge, {}, nil, s.decode_s
  for i = 1, s.count do
    compute_s[i] = (s.prompt - (s.matched[i] or 0)) / s.speed[i]
    own_s[i] = compute_s[i] + (decode_s and min(decode_s[i], s.prompt / s.median) or 0)
    size_s = min(size_s, compute_s[i])
    local k, serves = #named, s.cost[i] < math.huge
    if not serves then own_s[i] = math.huge end
    if serves and (not dearest or own_s[i] > own_s[dearest]) then dearest = i end
    if serves and (k <= NAMED or own_s[i] < own_s[named[k]]) then
      if k <= NAMED then k = k + 1 end
      while k > 1 and own_s[named[k - 1]] > own_s[i] do
        named[k], k = named[k - 1], k - 1
      end
      named[k] = i
    end
  end
  return own_s, compute_s, size_s, named, #named > NAMED and named[NAMED + 1] or dearest or 1
end

-- Tell whether a worker is computing half of the prompt or more at this moment.
local function is_being_made(s)
  local most = 0
  for i, blocks in pairs(s.speculated) do
    most = max(most, s.matched[i] * (1 - (s.confirmed[i] or 0) / blocks)) -- confirmed blocks are computed already
  end
  return 2 * most >= s.prompt
end

return function(s, w, request, with_room, everybody, queue2_key, leases_key)
  local id, constants = request.id, request.constants
  local queue = request.dry
    and (include "decide/dry_tickets")(tickets, queue2_key, request.now_us, constants.ticket_ms)
    or tickets(queue2_key, request.now_us, constants.ticket_ms, request.prefix)
  local flow = queue.flow(request.priority, request.tenant)
  local slots = {} -- slot -> number of the candidate among all engines (`everybody`)
  local function answer(word, turn_s, matched)
    local work_ms = math.ceil(queue.work_us() / 1000 / s.count)
    return { word, queue.waiting(), work_ms, string.format("%.6f", turn_s or 0), matched or 0 }
  end
  -- Return the room of all engines, and the room of this request's candidates in seconds, by candidate.
  local function room()
    local all = everybody()
    local limit_s = queue.limit_s(constants.max_engine_wait_s)
    local left, own = turns.room_left(all, room_of_engines(all, limit_s, constants.block_sizes)), {}
    for i = 1, all.count do slots[all.slots[i]] = i end
    return left, function()
      for i = 1, s.count do own[i] = left.room[slots[s.slots[i]]] or 0 end
      return own
    end
  end

  -- The first write frees memory, after which a full Redis allows further writes.
  if not request.dry then call("ZREM", leases_key, id) end
  queue.reap(MAX_REAPED)
  local ticket, refusal = queue.find(id), "FULL"
  if ticket == queue.DISPLACED then -- a displaced request tries anew: now there may be a place, or room
    queue.leave(id)
    ticket, refusal = nil, "DISPLACED"
  end

  local own_s, compute_s, size_s, named, other = prices_of(s)
  local making = s.policy == "cost" and is_being_made(s)
  request.size_us, request.named, request.patience = us(size_s), {}, constants.patience
  request.tie_us, request.rest_us = MAX_US, 0
  if s.policy == "cost" then
    request.tie_us, request.rest_us = us(s.tie_s), price_of(own_s[other], compute_s[other])
    for k = 1, min(NAMED, #named) do
      local i = named[k]
      request.named[k] = { slot = s.slots[i], us = price_of(own_s[i], compute_s[i]) }
    end
  end
  request.barred = slots_of(request.barred, request.rows)
  if making then request.barred = request.barred .. MAKING end
  -- Return the price of the turn at the cheapest candidate, before tickets take turns, and its matched tokens.
  local function price(left)
    local scale = making and left.making_scale or 1
    local function late(i) return left.late[slots[s.slots[i]]] or 0 end
    local function waits(i) return (left.ahead[slots[s.slots[i]]] or 0) - late(i) end
    local least, nearest
    for i = 1, s.count do
      local seconds = scale * waits(i) + late(i) + own_s[i]
      if not least or seconds < least then least, nearest = seconds, i end
    end
    s.turn_at = nearest
    local wait_s = waits(nearest) / left.wait_price + queue.ahead_us(flow, request.size_us) / US / s.count
    return compute_s[nearest] + late(nearest) + WAIT_PRICE * wait_s, s.matched[nearest]
  end

  if ticket then
    queue.renew(id)
    queue.review(id, ticket, request)
  else
    local most = request.queue_max
    if queue.waiting() >= most and not (request.displaces and queue.displace(flow)) then
      -- The request cannot wait, so it may take room at any worker, if the waiting tickets leave some over.
      local left, own = room()
      turns.take(queue, left, MAX_TURNS)
      s.room = own()
      local free = with_room(s, w, s.room)
      if not free then return answer(refusal) end
      return nil, free, function() end
    end
    queue.enter(id, flow, request)
  end

  local left, own = room()
  local turn_s, matched = price(left)
  local may_wait = request.queue_max > 0
  local function stays()
    if may_wait then return answer("QUEUED", turn_s, matched) end
    queue.leave(id)
    return answer("FULL")
  end
  if not with_room(s, w, own()) then return stays() end
  local mine = turns.take(queue, left, MAX_TURNS, id)[id]
  if not mine and may_wait then return stays() end
  local free = own() -- room that waiting tickets leave over
  s.room = free
  for i = 1, s.count do
    if mine and s.slots[i] == left.slots[mine] then free[i] = 1 end -- room that its own ticket has taken
  end
  local chosen = with_room(s, w, free)
  if not chosen then return stays() end
  return nil, chosen, function(work) queue.leave(id, max(work, 1), LAG_S * s.median) end
end
