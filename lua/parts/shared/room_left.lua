--[[
shared/room_left: the room of all engines, as tickets take it one after another.

A ticket is served by a worker with room that is as cheap for it as any other worker, busy ones included: a request
waits for the engine that holds its prompt while that is cheaper than to compute it elsewhere. What a ticket costs at a
worker is told by its prices (decide/prices), as they were when it was last decided, and by what is ahead there now:
also by the tickets before it that wait for that worker. So a long line for one engine spreads to engines that are free.
An engine that should have ended its prefill long ago is as much dearer: nobody knows when it will go on.

Guarantee: pure. Takes the state of shared/candidates, and room_of and overdue_s (shared/capacity).
Returns any(), whether a worker has room; cheapest(record of a ticket), the worker that is cheapest for it, and whether
that has room; take(record of a ticket), which takes the room of the candidate that serves it, and returns that and the
tokens that it has to compute, or nil if none serves it now; by candidate room (seconds that are left), slots, and ahead (seconds that the wait for it counts); wait_price.
--]]
local unpack_from, sub, floor, max, huge = struct.unpack, string.sub, math.floor, math.max, math.huge
local TICKET_PRICES, TICKET_OWN_AT, TICKET_OWN, OWN_BYTES = ">I4I4I4I4B", 59, ">I4I4", 8 -- of a ticket's record
local BARRED_SLOT, SLOT_BYTES = ">I4", 4 -- at the end of a ticket's record
local WORKER_ID_AT, US, NO_ROOM_S = 59, 1e6, 1e-9 -- of a packed row; in a second; what subtractions may leave over
-- Seconds of waiting count half as much as seconds of computing: while requests wait, what an engine computes once more
-- delays all of them.
local WAIT_PRICE = 0.5

return function(s, room_of, overdue_s)
  local room, base, by_slot, allowed, left, least, first = {}, {}, {}, {}, {}, nil, nil
  local function look()
    least, first = nil, nil
    for i = 1, s.count do
      if not least or base[i] < base[least] then least = i end
      if room[i] > NO_ROOM_S and (not first or base[i] < base[first]) then first = i end
    end
  end
  for i = 1, s.count do
    room[i], base[i], by_slot[s.slots[i]] = room_of(i), WAIT_PRICE * s.base_s[i] + overdue_s(i), i
  end
  look()
  left.room, left.slots, left.ahead, left.wait_price = room, s.slots, base, WAIT_PRICE

  function left.any() return first ~= nil end

  -- The candidates that may serve a ticket. Tickets for one adapter bar the same workers.
  local function allowed_by(barred)
    local found, is_barred = allowed[barred], {}
    if not found then
      found = {}
      -- A ticket of an older replica has ids here, which bar nobody: their number of bytes is any.
      for at = 1, #barred - SLOT_BYTES + 1, SLOT_BYTES do is_barred[unpack_from(BARRED_SLOT, barred, at)] = true end
      for i = 1, s.count do
        if not is_barred[s.slots[i]] then found[#found + 1] = i end
      end
      allowed[barred] = found
    end
    return found
  end

  -- A ticket's size, its tie, its lowest cost and whose that is, its lowest cost with room and whose that is, and what
  -- it costs to compute there (0 with policies that do not look at costs).
  local function costs_of(ticket)
    local _, size_us, tie_us, rest_us, count = unpack_from(TICKET_PRICES, ticket)
    local barred = sub(ticket, TICKET_OWN_AT + OWN_BYTES * count)
    local those = barred ~= "" and allowed_by(barred)
    local lowest, nearest, best, chosen, chosen_us = huge, nil, huge, nil, 0
    local function consider(i, own_us)
      local cost = base[i] + own_us / US
      if cost < lowest then lowest, nearest = cost, i end
      if room[i] > NO_ROOM_S and cost < best then best, chosen, chosen_us = cost, i, own_us end
    end
    if those then
      for k = 1, #those do consider(those[k], rest_us) end
    else
      consider(least, rest_us)
      if first then consider(first, rest_us) end
    end
    for k = 0, count - 1 do -- decide named none that may not serve it
      local slot, own_us = unpack_from(TICKET_OWN, ticket, TICKET_OWN_AT + OWN_BYTES * k)
      if by_slot[slot] then consider(by_slot[slot], own_us) end
    end
    return size_us, tie_us, lowest, nearest, best, chosen, chosen_us
  end

  function left.cheapest(ticket)
    local _, _, _, nearest = costs_of(ticket)
    return nearest and sub(s.rows[nearest], WORKER_ID_AT) or "", nearest and room[nearest] > NO_ROOM_S
  end

  function left.take(ticket)
    local size_us, tie_us, lowest, nearest, best, chosen, chosen_us = costs_of(ticket)
    if not chosen or best > lowest + tie_us / US then
      if nearest then base[nearest] = base[nearest] + WAIT_PRICE * size_us / US end
      if nearest == least then look() end
      return nil
    end
    room[chosen], base[chosen] = room[chosen] - size_us / US, base[chosen] + WAIT_PRICE * size_us / US
    look()
    return chosen, floor(max(size_us, chosen_us) * s.speed[chosen] / US + 0.5)
  end

  return left
end
