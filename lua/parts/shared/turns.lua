--[[
shared/turns: finds which waiting requests (shared/tickets) may be served now ("have their turn"), and by which engine.

Choice. A ticket is served by a worker with room if no other worker, busy or not, is cheaper for it: so a request waits
for the engine that holds its prompt while that is cheaper than to compute the prompt elsewhere. A ticket's cost at a
worker is its price (seconds to compute what the worker lacks of the prompt, and that answers under way there lose,
noted by decide/wait_turn) plus the work ahead there now, with earlier tickets that wait for the worker. So a long line
for one engine spreads to free engines.
An engine that is overdue with its prefill costs as much more as it is overdue, for nobody knows when it goes on.

Waiting. A request that does not wait for the engine that holds its prompt makes another engine compute the prompt once
more, which delays requests that arrive there meanwhile: by about b / (1 - b) seconds for each second of computing,
where b is the share of time in prefill (busy_share, shared/candidates). So a second of computing costs 1 / (1 - b), and
relative to that a second of waiting costs 1 - b. b is the mean of all engines, which is steadier than the share of one
engine, but at most twice the share of the engine that would compute: an engine with little to do, such as a new one, is
not left idle because others are busy. While another worker is computing half of a ticket's prompt or more, a second of
waiting costs at most half a second. Else an idle fleet would compute a new prefix of many simultaneous requests on all
engines, which takes no longer than to wait for the first engine.

Turns. Tickets are looked at in order. Passed over is a ticket whose cheapest workers are all busy, or that no worker
with room can serve. At most `most` tickets are looked at. Each flow (tickets of one tenant and priority) may have an
equal part of them passed over, at least two: half at its front, half further back. So a tenant whose worker is busy
delays neither other tenants nor all of its own requests for other workers. If `most` is too small for all flows, and
half of the looks found no turn, the others are at flows further back.

Guarantee: writes nothing. Returns two functions by name: room_left, and take (take_turns). An engine's room is that of
shared/room.
--]]
local unpack_from, sub = struct.unpack, string.sub
local floor, max, min, huge = math.floor, math.max, math.min, math.huge
local MAKING_PRICE = 0.5 -- highest cost of a second of waiting for a ticket whose prompt a worker is computing
local LEAST_WAIT_PRICE = 0.1 -- lowest cost of a second of waiting; without it lines grow long at always busy engines
local GOLDEN_RATIO = 0.6180339887 -- multiples of it spread evenly between whole numbers

-- Make a function that returns, of a list of candidates, the one with the least work ahead, of equals the least busy,
-- then the first; nil if none is left. With `room` (by candidate), candidates without room are left out. Work ahead
-- only grows and room only shrinks, so in the heap of candidates only the top must be compared with its present work.
local function least_of(those, ahead, share, room)
  local heap, known, count = nil, {}, 0
  local function before(i, k)
    if known[i] ~= known[k] then return known[i] < known[k] end
    if share[i] ~= share[k] then return share[i] < share[k] end
    return i < k
  end
  local function sift(at)
    local i = heap[at]
    local child = 2 * at
    while child <= count do
      local k, other = heap[child], heap[child + 1]
      if other and before(other, k) then k, child = other, child + 1 end
      if not before(k, i) then break end
      heap[at], at, child = k, child, 2 * child
    end
    heap[at] = i
  end
  local function fill()
    heap = {}
    for k = 1, #those do
      local i = those[k]
      if not room or room[i] > NO_ROOM_S then
        count = count + 1
        heap[count], known[i] = i, ahead[i]
      end
    end
    for at = floor(count / 2), 1, -1 do sift(at) end
  end
  return function()
    if not heap then fill() end
    while count > 0 do
      local i = heap[1]
      if room and room[i] <= NO_ROOM_S then
        heap[1] = heap[count]
        heap[count] = nil
        count = count - 1
        if count == 0 then return nil end
      elseif ahead[i] > known[i] then
        known[i] = ahead[i]
      else
        return i
      end
      sift(1)
    end
  end
end

-- Make a table of the room that engines have left, while tickets take it one by one. Takes the state of
-- shared/candidates, and room_of and overdue_s (shared/room). Returns
--   any(): whether some worker has room
--   stands(record of a ticket): the worker that the ticket gets or waits for; whether it gets that worker now; whether
--     any worker that may serve it has room; the us that its worker needs for what this lacks of the prompt
--   take(record of a ticket): books the room that the ticket needs at the candidate that serves it; returns the
--     candidate and the tokens that it must compute, or nil if none serves the ticket now
--   by candidate: slots, room (seconds of prefill that may still be booked), late (seconds overdue with its prefill),
--     ahead (late, plus wait_price times the seconds of work that a ticket would wait for there)
--   wait_price: cost of a second of waiting, in seconds of computing
--   making_scale: what wait_price is multiplied by for a ticket whose prompt a worker is computing now
local function room_left(s, room_of, overdue_s)
  local share, busy = s.busy_share, 0
  for i = 1, s.count do busy = busy + share[i] / s.count end
  local wait_price = max(1 - busy, LEAST_WAIT_PRICE)
  local making_scale = min(wait_price, MAKING_PRICE) / wait_price

  local room, late, ahead, by_slot = {}, {}, {}, {}
  local free = false
  for i = 1, s.count do
    room[i], late[i], by_slot[s.slots[i]] = room_of(i), overdue_s(i), i
    ahead[i] = wait_price * s.base_s[i] + late[i]
    free = free or room[i] > NO_ROOM_S
  end
  local left = { room = room, slots = s.slots, late = late, ahead = ahead, wait_price = wait_price,
    making_scale = making_scale }

  -- Find the candidates with the least work ahead that may serve a ticket: `any` among all, `first` among those with
  -- room. Stored by set of barred workers, because tickets for one adapter bar the same workers.
  local allowed = {}
  local function allowed_by(barred)
    if allowed[barred] then return allowed[barred] end
    local is_barred, those = {}, {}
    -- Bytes beyond whole slots bar no worker: the mark MAKING is such a byte.
    for at = 1, #barred - SLOT_BYTES + 1, SLOT_BYTES do is_barred[unpack_from(BARRED_SLOT, barred, at)] = true end
    for i = 1, s.count do
      if not is_barred[s.slots[i]] then those[#those + 1] = i end
    end
    allowed[barred] = { any = least_of(those, ahead, share), first = least_of(those, ahead, share, room) }
    return allowed[barred]
  end

  local first = free and allowed_by("").first
  function left.any() return free and first() ~= nil end

  -- Return the cost, in seconds, of waiting for a worker. scale: 1, or making_scale.
  local function waits(i, scale) return ahead[i] + (scale - 1) * (ahead[i] - late[i]) end

  -- Return a ticket's size, tie (us within which costs count as equal), lowest cost and its candidate, lowest cost with
  -- room and its candidate, the price there (0 for policies that look at no costs), and whether a worker is computing
  -- its prompt.
  local function costs_of(ticket)
    local _, size_us, tie_us, rest_us, count = unpack_from(TICKET_PRICES, ticket)
    local barred = sub(ticket, TICKET_OWN_AT + OWN_BYTES * count)
    local making = #barred % SLOT_BYTES == #MAKING
    local scale = making and making_scale or 1
    local those = allowed_by(barred)
    local lowest, nearest = huge, those.any()
    local best, chosen, chosen_us = huge, those.first(), 0
    if nearest then lowest = waits(nearest, scale) + rest_us / US end
    if chosen then best, chosen_us = waits(chosen, scale) + rest_us / US, rest_us end
    for at = TICKET_OWN_AT, TICKET_OWN_AT + OWN_BYTES * (count - 1), OWN_BYTES do
      local slot, own_us = unpack_from(TICKET_OWN, ticket, at)
      local i = by_slot[slot] -- nil: no candidate now. The ticket names no barred workers
      if i then
        local cost = waits(i, scale) + own_us / US
        if cost < lowest then lowest, nearest = cost, i end
        if cost < best and room[i] > NO_ROOM_S then best, chosen, chosen_us = cost, i, own_us end
      end
    end
    return size_us, tie_us, lowest, nearest, best, chosen, chosen_us, making
  end

  -- Tell whether a ticket takes the candidate with room (`chosen`), because to wait for `nearest` is not cheaper.
  -- The busier the chosen one is, the less a second of waiting costs.
  local function takes(tie_us, lowest, nearest, best, chosen, making)
    if not chosen then return false end
    local price = max(1 - 2 * share[chosen], wait_price)
    if making then price = min(price, MAKING_PRICE) end
    local more = price / wait_price - (making and making_scale or 1)
    if more > 0 then
      best = best + more * (ahead[chosen] - late[chosen])
      lowest = lowest + more * (ahead[nearest] - late[nearest])
    end
    return best <= lowest + tie_us / US
  end

  -- Return the us to compute that are in a ticket's price.
  local function computing(price)
    local part = price % PRICE_STEP
    return (price - part) * part / (PRICE_STEP - 1)
  end

  function left.stands(ticket)
    local _, tie_us, lowest, nearest, best, chosen, _, making = costs_of(ticket)
    local is_turn = takes(tie_us, lowest, nearest, best, chosen, making)
    local worker = is_turn and chosen or nearest
    if not worker then return "", false, false, 0 end
    local _, _, _, own_us, count = unpack_from(TICKET_PRICES, ticket)
    for k = 0, count - 1 do
      local slot, named_us = unpack_from(TICKET_OWN, ticket, TICKET_OWN_AT + OWN_BYTES * k)
      if slot == s.slots[worker] then own_us = named_us end
    end
    return sub(s.rows[worker], WORKER_ID_AT), is_turn, chosen ~= nil, floor(computing(own_us) + 0.5)
  end

  function left.take(ticket)
    local size_us, tie_us, lowest, nearest, best, chosen, chosen_us, making = costs_of(ticket)
    if not takes(tie_us, lowest, nearest, best, chosen, making) then
      if nearest then ahead[nearest] = ahead[nearest] + wait_price * size_us / US end
      return nil
    end
    local taken_us = max(size_us, computing(chosen_us))
    room[chosen], ahead[chosen] = room[chosen] - taken_us / US, ahead[chosen] + wait_price * taken_us / US
    return chosen, floor(taken_us * s.speed[chosen] / US + 0.5)
  end

  return left
end

-- Insert a flow into the order by its new score; the order is sorted from `head` on.
local function put_back(order, head, score, flow)
  local low, high = head, #order + 1
  while low < high do
    local middle = floor((low + high) / 2)
    local at = order[middle]
    local before = score[at] < score[flow] or score[at] == score[flow] and at < flow
    low, high = before and middle + 1 or low, before and high or middle
  end
  table.insert(order, low, flow)
end

-- Return the position at which to go on in a line of `length` tickets or flows whose first k got no turn. The position
-- moves with the clock, so that all get looked at in time; with `rank`, the item of that rank will be the last of the
-- next `most` ones.
local function further(length, k, most, rank, now_ms)
  if rank then return max(k, rank + 1 - most) end
  local part = floor(math.ceil((length - k) / most) * (now_ms * GOLDEN_RATIO % 1))
  return k + max(0, min(part * most, length - k - most))
end

-- Find the tickets that have their turn, in order, while workers have room. Takes the queue (shared/tickets), the room
-- of all engines (room_left), the number of tickets to look at, and the id of a ticket after which to stop (or nil).
-- Returns id -> candidate.
local function take_turns(queue, left, most, last)
  local turns = {}
  local order, head, score = {}, 1, {} -- members of :flows; index of the next; score by member
  local place, pages, missed = {}, {}, {} -- by flow: index of its next ticket, page read last, tickets passed over
  local seen, in_vain, go_on_at = 0, 0, 0
  local function read(first, count)
    local found = queue.line(first, count)
    order, head, go_on_at = {}, 1, first + count
    for k = 1, #found, 2 do order[#order + 1], score[found[k]] = found[k], tonumber(found[k + 1]) end
  end
  if left.any() then read(0, most) end
  local misses_each = max(2, floor(most / #order))
  local more = #order * misses_each > most
  for looked = 1, most do
    if more and head > #order then read(go_on_at, most - looked + 1) end
    local flow = order[head]
    if not flow or turns[last] or not left.any() then break end
    local k, name, page = place[flow] or 0, sub(flow, PLACE_BYTES + 1), pages[flow]
    if not page or k < page.at or k >= page.beyond then
      page = queue.page(name, k)
      pages[flow] = page
    end
    local id = page.ids[k - page.at + 1]
    local ticket = id and page.records[k - page.at + 1]
    local worker, work
    if ticket and #ticket >= TICKET_OWN_AT - 1 then worker, work = left.take(ticket) end
    seen, place[flow] = place[flow] and seen or seen + 1, k + 1
    if worker then
      turns[id], score[flow], head = worker, score[flow] + max(work, 1), head + 1 -- as if served
      put_back(order, head, score, flow)
    else
      local misses, rest = (missed[flow] or 0) + 1, most - looked
      missed[flow], in_vain = misses, in_vain + 1
      if more and in_vain == floor(most / 2) and rest > 0 then
        local flows = max(1, floor(rest / misses_each))
        read(further(queue.flows(), seen, flows, last and queue.rank_of_flow(last), queue.now_ms), rest)
      elseif not id or misses >= misses_each then
        head = head + 1
      elseif misses == floor(misses_each / 2) then
        local looks = min(misses_each - misses, rest)
        place[flow] = further(queue.length(name), k + 1, looks, last and queue.rank_in(name, last), queue.now_ms)
        if place[flow] >= queue.length(name) then head = head + 1 end
      end
    end
  end
  return turns
end

return { room_left = room_left, take = take_turns }
