--[[
shared/capacity: how much more the engines may be given before requests wait in their replicas.

Guarantee: pure. A worker is saturated while the prefill that is booked there takes longer than limit_s, or its booked
context fills 95 % of its cache and some of it is still to be computed (context that requests share is counted for each,
so a cache is known to be full only by what does not get into it). One without any work never is, nor one that is
approximate: of its prefill only streams tell when it is done, and its speed is not known.
Takes the candidates (shared/candidates), limit_s, block_sizes (scheme=tokens, joined by commas) and whether one will
do.
Returns whether there is one; else {tokens that have room, count of workers with room, serves(ids joined by commas): one
of them is not in there}.
--]]
local unpack_from, sub, band = struct.unpack, string.sub, bit.band
local APPROXIMATE, FULL = 16, 0.95

return function(s, limit_s, block_sizes, one_will_do)
  local sizes, names, room = {}, {}, { tokens = 0, count = 0 }
  for i = 1, s.count do
    local decode, flight, flags, scheme, foreign_decode, capacity =
      unpack_from(">i4i4xxxxI2I4xxxxxxxxI4xxxxI4", s.rows[i], 9)
    local ahead, limit = s.wait[i], limit_s * s.speed[i]
    local size = sizes[scheme] or tonumber((("," .. block_sizes):match("," .. scheme .. "=(%d+)"))) or 0
    local tokens, cache = limit - ahead, capacity * size * FULL
    sizes[scheme] = size
    if band(flags, APPROXIMATE) ~= 0 then
      tokens = limit
    elseif ahead + flight + foreign_decode == 0 then
      tokens = math.max(limit, 1)
    elseif cache > 0 and ahead + decode + foreign_decode > cache then
      tokens = ahead == 0 and 1 or 0
    end
    if tokens > 0 then
      if one_will_do then return true end
      room.tokens, room.count = room.tokens + tokens, room.count + 1
      names[room.count] = sub(s.rows[i], 59)
    end
  end
  if one_will_do then return false end
  function room.serves(barred)
    if barred == "" then return true end
    barred = "," .. barred .. ","
    for k = 1, room.count do
      if not barred:find("," .. names[k] .. ",", 1, true) then return true end
    end
    return false
  end
  return room
end
