--[[
tick/dead_engine: gives back the load of an engine that is dead, if it reported the ends of requests: nobody else tells
their ends where routers have left the reservations to it.

Guarantee: all its leases lose their load at once, by a new epoch of its row, whichever routers hold them; they end by
settle or by their expiry. If the engine lives after all (its machine stood still), its first tally differs, and the
list that follows books what it still has again (apply/reservations).

Takes the keys load and next_slot, the key prefix, and the server's time in ms. Returns bury(worker, row), which returns
the worker's row as it is then.
--]]
local call = redis.call

return function(load_key, next_slot_key, prefix, now)
  return function(worker, row)
    local _, prefill, decode, count = struct.unpack(ROW_EPOCH_TO_IN_FLIGHT, row)
    if count == 0 or call("UNLINK", prefix .. "running:" .. worker) == 0 then return row end
    (include "shared/row_load")(load_key, now)(worker, nil, -prefill, -decode, -count)
    row = struct.pack(ROW_EPOCH, call("INCR", next_slot_key)) .. call("HGET", load_key, worker):sub(AFTER_EPOCH)
    call("HSET", load_key, worker, row)
    return row
  end
end
