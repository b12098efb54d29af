--[[
shared/room_left: the room of all engines, as tickets take it one after another.

A ticket is served by a worker with room that is as cheap for it as any other worker, busy ones included: a request
waits for the engine that holds its prompt while that is cheaper than to compute it elsewhere. What a ticket costs at a
worker is told by its prices (decide/prices), as they were when it was last decided, and by what is ahead there now:
also by the tickets before it that wait for that worker. So a long line for one engine spreads to engines that are free.
An engine that should have ended its prefill long ago is as much dearer: nobody knows when it will go on.

A request that does not wait for the engine that holds its prompt makes another one compute it once more. That delays
the requests that come while that one is busy: the busier it is, the more of them. A rule of thumb for that is
b / (1 - b) seconds of delay for each second more, where b is the share of time in prefill (shared/candidates,
busy_share). So a second of computing costs 1 / (1 - b), and against that a second of waiting counts 1 - b. b is the
mean of all engines, which is steadier than the share of each, but twice the share of the engine that would compute it
at most: one that has little to do, as one that has just joined, is not left idle because others are busy.

Where another worker is making half of a ticket's prompt or more at this moment, a second of waiting counts half at
most. Else all of an idle fleet would compute a new prefix that comes in many requests at once: that takes no longer
than to wait for the first worker that computes it.

Guarantee: pure. Takes the state of shared/candidates, and room_of and overdue_s (shared/capacity).
Returns any(), whether a worker has room; stands(record of a ticket), the worker that it gets or waits for, whether it
gets that now, whether any worker that may serve it has room, and the us that this worker needs for it; take(record of
a ticket), which takes room of the candidate that serves it, as much as the ticket will use there, and returns the
candidate and the tokens that it has to compute, or nil if none serves it now; by candidate room (seconds that are
left), slots, late (seconds that it is overdue), and ahead (seconds that the wait for it counts, with those);
wait_price, how much a second of waiting counts by the mean; making_scale, how much of that it counts for a ticket whose
prompt another worker is making.
--]]
local unpack_from, sub, floor, max, min, huge = struct.unpack, string.sub, math.floor, math.max, math.min, math.huge
local MAKING_PRICE = 0.5 -- of a second of waiting for such a ticket, at most
local LEAST_WAIT_PRICE = 0.1 -- else no line for an engine would be too long if all are busy all the time

-- Of a list of candidates the one with the least ahead, of equals the least busy, then the first: a function that
-- tells it, nil if none is left. room: by candidate; a candidate without room is left out. Work ahead only grows and
-- room only shrinks, so it is a heap by the work that was ahead of each when it was last on top.
local function least_of(those, base, share, room)
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
        heap[count], known[i] = i, base[i]
      end
    end
    for at = math.floor(count / 2), 1, -1 do sift(at) end
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
      elseif base[i] > known[i] then
        known[i] = base[i]
      else
        return i
      end
      sift(1)
    end
  end
end

return function(s, room_of, overdue_s)
  local room, base, late, by_slot, allowed, left, free = {}, {}, {}, {}, {}, {}, false
  local share, busy = s.busy_share, 0
  for i = 1, s.count do busy = busy + share[i] / s.count end
  local wait_price = max(1 - busy, LEAST_WAIT_PRICE)
  for i = 1, s.count do
    room[i], late[i], by_slot[s.slots[i]] = room_of(i), overdue_s(i), i
    base[i] = wait_price * s.base_s[i] + late[i]
    free = free or room[i] > NO_ROOM_S
  end
  -- By how much the wait for a worker counts less for a ticket whose prompt another worker is making.
  local making_scale = min(wait_price, MAKING_PRICE) / wait_price
  left.room, left.slots, left.late, left.ahead, left.wait_price = room, s.slots, late, base, wait_price
  left.making_scale = making_scale

  -- Of the candidates that may serve a ticket those with the least ahead: `any` of all, `first` of those with room.
  -- Tickets for one adapter bar the same workers.
  local function allowed_by(barred)
    if allowed[barred] then return allowed[barred] end
    local is_barred, those = {}, {}
    -- Bytes that make no whole slot bar nobody: a mark is one, and a ticket of an older replica has ids here.
    for at = 1, #barred - SLOT_BYTES + 1, SLOT_BYTES do is_barred[unpack_from(BARRED_SLOT, barred, at)] = true end
    for i = 1, s.count do
      if not is_barred[s.slots[i]] then those[#those + 1] = i end
    end
    allowed[barred] = { any = least_of(those, base, share), first = least_of(those, base, share, room) }
    return allowed[barred]
  end

  local first = free and allowed_by("").first
  function left.any() return free and first() ~= nil end

  -- Seconds that the wait for a worker counts, where a second of it counts `scale` of what it counts for most tickets.
  local function waits(i, scale) return base[i] + (scale - 1) * (base[i] - late[i]) end

  -- A ticket's size, its tie, its lowest cost and whose that is, its lowest cost with room and whose that is, what it
  -- costs to compute there (0 with policies that do not look at costs), and whether a worker is making its prompt.
  local function costs_of(ticket)
    local _, size_us, tie_us, rest_us, count = unpack_from(TICKET_PRICES, ticket)
    local barred = sub(ticket, TICKET_OWN_AT + OWN_BYTES * count)
    local those, making = allowed_by(barred), #barred % SLOT_BYTES == #MAKING
    local scale = making and making_scale or 1
    local lowest, nearest, best, chosen, chosen_us = huge, those.any(), huge, those.first(), 0
    if nearest then lowest = waits(nearest, scale) + rest_us / US end
    if chosen then best, chosen_us = waits(chosen, scale) + rest_us / US, rest_us end
    for at = TICKET_OWN_AT, TICKET_OWN_AT + OWN_BYTES * (count - 1), OWN_BYTES do
      local slot, own_us = unpack_from(TICKET_OWN, ticket, at)
      local i = by_slot[slot] -- decide named none that may not serve it
      if i then
        local cost = waits(i, scale) + own_us / US
        if cost < lowest then lowest, nearest = cost, i end
        if cost < best and room[i] > NO_ROOM_S then best, chosen, chosen_us = cost, i, own_us end
      end
    end
    return size_us, tie_us, lowest, nearest, best, chosen, chosen_us, making
  end

  -- Whether a ticket of these costs takes the candidate with room: at the price of waiting by what that has to do.
  local function takes(tie_us, lowest, nearest, best, chosen, making)
    if not chosen then return false end
    local price = max(1 - 2 * share[chosen], wait_price)
    if making then price = min(price, MAKING_PRICE) end
    local more = price / wait_price - (making and making_scale or 1)
    if more > 0 then
      best, lowest = best + more * (base[chosen] - late[chosen]), lowest + more * (base[nearest] - late[nearest])
    end
    return best <= lowest + tie_us / US
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
    return sub(s.rows[worker], WORKER_ID_AT), is_turn, chosen ~= nil, own_us
  end

  function left.take(ticket)
    local size_us, tie_us, lowest, nearest, best, chosen, chosen_us, making = costs_of(ticket)
    if not takes(tie_us, lowest, nearest, best, chosen, making) then
      if nearest then base[nearest] = base[nearest] + wait_price * size_us / US end
      return nil
    end
    local taken_us = max(size_us, chosen_us)
    room[chosen], base[chosen] = room[chosen] - taken_us / US, base[chosen] + wait_price * taken_us / US
    return chosen, floor(taken_us * s.speed[chosen] / US + 0.5)
  end

  return left
end
