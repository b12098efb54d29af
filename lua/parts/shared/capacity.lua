--[[
shared/capacity: how much more the engines may be given before requests must wait in their replicas.

A worker is saturated while the prefill that is booked there takes longer than limit_s, or while its booked context
fills 95 % of its cache and some of that is still to be computed. (Bookings are guesses, so a cache is known to be full
only by prefill that does not get into it.) Never saturated: a worker without any
work, and an approximate worker, of which neither the speed nor the end of a prefill is known.

Guarantee: pure. Takes the state of shared/candidates, limit_s, block_sizes (scheme=tokens, joined by commas), and
whether the caller only asks if there is any room.
Returns true or false if that is all that is asked; else {tokens: that have room, count: of workers with room,
serves(ids joined by commas): whether a worker with room is not among the ids}.
--]]
local unpack_from, sub, band = struct.unpack, string.sub, bit.band
local DECODE_TOKENS_AT, WORKER_ID_AT = 9, 59 -- of a packed row
local ROW_DECODE_TOKENS_TO_CAPACITY_BLOCKS = ">i4i4xxxxI2I4xxxxI4I4xxxxI4"
local FLAG_APPROXIMATE, FULL_SHARE = 16, 0.95

return function(s, limit_s, block_sizes, only_whether)
  local sizes, names, capacity = {}, {}, { tokens = 0, count = 0 }
  for i = 1, s.count do
    local decode, flight, flags, scheme, foreign, foreign_decode, capacity_blocks =
      unpack_from(ROW_DECODE_TOKENS_TO_CAPACITY_BLOCKS, s.rows[i], DECODE_TOKENS_AT)
    local ahead, limit = s.wait[i], limit_s * s.speed[i]
    local size = sizes[scheme] or tonumber((("," .. block_sizes):match("," .. scheme .. "=(%d+)"))) or 0
    local tokens, cache = limit - ahead, capacity_blocks * size * FULL_SHARE
    sizes[scheme] = size
    if band(flags, FLAG_APPROXIMATE) ~= 0 then
      tokens = limit
    elseif ahead + flight + foreign_decode == 0 then
      tokens = math.max(limit, 1)
    elseif cache > 0 and decode + foreign + foreign_decode > cache then
      tokens = ahead == 0 and 1 or 0
    end
    if tokens > 0 then
      if only_whether then return true end
      capacity.tokens, capacity.count = capacity.tokens + tokens, capacity.count + 1
      names[capacity.count] = sub(s.rows[i], WORKER_ID_AT)
    end
  end
  if only_whether then return false end
  function capacity.serves(barred)
    if barred == "" then return true end
    barred = "," .. barred .. ","
    for k = 1, capacity.count do
      if not barred:find("," .. names[k] .. ",", 1, true) then return true end
    end
    return false
  end
  return capacity
end
