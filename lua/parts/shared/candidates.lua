--[[
shared/candidates: the workers that a decision may choose among, and what their load rows say.

Guarantee: pure. Takes every load row, the ids of the workers that are alive (nil: all), the fleet's median speed
(tokens/s; none is held for slower than 1/8 or faster than 8 times that), decode_s_per_token and the time (ms). Returns
tables by candidate, meaningless beyond the last: rows, wait (tokens ahead), base_s (seconds until its turn), speed
(tokens/s), fill (share of its cache), cost (to be set); for all: count, least_wait, total_fill; usable: flags ->
"match" or "load"; by_scheme: scheme -> slot -> candidate.
--]]
local unpack_from, sub, band, min = struct.unpack, string.sub, bit.band, math.min
local U32 = 2 ^ 32

return function(all, alive, median, decode_s, now)
  local slowest, fastest, count, least_wait, total_fill = median / 8, median * 8, 0, math.huge, 0
  -- A table that grows is counted anew at each power of two: these begin in their size. Beyond count they mean nothing.
  local some, by_scheme, usable = #all <= 4096 and all or {}, {}, {}
  local rows, wait, base_s = { unpack(some) }, { unpack(some) }, { unpack(some) }
  local speed, fill, cost = { unpack(some) }, { unpack(some) }, { unpack(some) }
  for k = 1, #all do
    local prefill, decode, slot, flags, scheme, tps, foreign, foreign_decode, blocks, capacity =
      unpack_from(">i4i4xxxxI4I2I4I4I4I4I4I4", all[k], 5)
    -- SERVER and URL, not DRAINING, not HOSTILE; its blocks may be matched if PROVEN or APPROXIMATE
    local use = usable[flags]
    if not use then
      use = band(flags, 139) ~= 3 and "no" or band(flags, 20) ~= 0 and "match" or "load"
      usable[flags] = use
    end
    if use ~= "no" and #all[k] > 58 and (not alive or alive[sub(all[k], 59)]) then
      if tps < slowest then tps = tps == 0 and median or slowest elseif tps > fastest then tps = fastest end
      local ahead, share = prefill + foreign, capacity > 0 and blocks / capacity or 0
      count, total_fill = count + 1, total_fill + share
      if ahead < least_wait then least_wait = ahead end
      rows[count], wait[count], speed[count], fill[count] = all[k], ahead, tps, share
      local done = 0 -- of the prefill under way, by time and speed; no more than that one: it may stand still
      if prefill > 0 then
        local under_way, since = unpack_from(">I4I4", all[k], 51)
        done = min((now - since) % U32 / 1000 * tps, under_way)
      end
      base_s[count] = (ahead - done) / tps + decode_s * (decode + foreign_decode)
      if use == "match" then
        local by_slot = by_scheme[scheme] or {}
        by_scheme[scheme], by_slot[slot] = by_slot, count
      end
    end
  end
  return { rows = rows, wait = wait, base_s = base_s, speed = speed, fill = fill, by_scheme = by_scheme, count = count,
    usable = usable, cost = cost, least_wait = least_wait, total_fill = total_fill, median = median, now = now }
end
