--[[
shared/capacity: which engines have room for one more prompt, and how much.

An engine has room while the prefill that is booked there, less what it has computed of what is under way, takes less
than limit_s. It has none while its booked context fills 95 % of its cache and some of that is still to be computed.
(Bookings are guesses, so a cache is known to be full only by prefill that does not get into it.) Always room has a
worker without any work. Of an approximate worker neither the speed nor the end of a prefill is known: it has room
unless its own metrics told of requests that wait there longer than until the next check, which counts as foreign
prefill.
Of foreign prefill only the part beyond REMEMBERED_S of work takes room. Up to there an engine may report a mean of the
past, with nothing left to compute (worker_plugin, load.py): it would stand idle while requests wait.

Guarantee: pure. Takes the state of shared/candidates, limit_s, block_sizes (scheme=tokens, joined by commas). Returns
two functions. room_of(candidate): seconds of prefill that it may be given more, 0 or less if it has no room, and the
seconds until it will have room, if it goes on at its speed: math.huge if only a report of the engine can tell.
overdue_s(candidate): how long ago its booked and foreign prefill should have ended by its speed, 0 if it is not
overdue, or if it began after now: the clock stepped back. An overdue engine stands still, or nothing gets into its
cache.
--]]
local unpack_from, band, max, min, huge = struct.unpack, bit.band, math.max, math.min, math.huge
local LEAST_ROOM_S = 1e-6
local REMEMBERED_S = 1.0 -- REMEMBERED_WORK_SECONDS of the plugin

return function(s, limit_s, block_sizes)
  local sizes = {}
  local function overdue_s(i)
    local prefill = unpack_from(ROW_PREFILL_TOKENS, s.rows[i], PREFILL_TOKENS_AT)
    local under_way, since = unpack_from(ROW_UNDER_WAY_TOKENS_TO_SINCE_MS, s.rows[i], UNDER_WAY_TOKENS_AT)
    if prefill <= 0 or under_way == 0 then return 0 end
    local passed = (s.now - since) % U32
    return passed < PAST_MS and max(0, passed / 1000 - s.wait[i] / s.speed[i]) or 0
  end
  local function room_of(i)
    local row, speed = s.rows[i], s.speed[i]
    local prefill, decode, flight, _, flags, scheme, _, foreign, foreign_decode, _, blocks =
      unpack_from(ROW_PREFILL_TOKENS_TO_CAPACITY_BLOCKS, row, PREFILL_TOKENS_AT)
    local ahead = prefill + max(0, foreign - REMEMBERED_S * speed)
    local approximate = band(flags, FLAG_APPROXIMATE) ~= 0
    if approximate and foreign > 0 then return 0, huge end
    if approximate or ahead + flight + foreign_decode == 0 then return max(limit_s, LEAST_ROOM_S), 0 end
    local size = sizes[scheme] or tonumber((("," .. block_sizes):match("," .. scheme .. "=(%d+)"))) or 0
    sizes[scheme] = size
    local cache = blocks * size * FULL_SHARE
    if cache > 0 and decode + foreign + foreign_decode > cache then
      return s.wait[i] == 0 and LEAST_ROOM_S or 0, s.wait[i] == 0 and 0 or huge
    end
    local done, left = 0, 0
    if prefill > 0 then
      local under_way, since = unpack_from(ROW_UNDER_WAY_TOKENS_TO_SINCE_MS, row, UNDER_WAY_TOKENS_AT)
      done = min((s.now - since) % U32 / 1000 * speed, under_way)
      left = under_way - done
    end
    local room = limit_s - (ahead - done) / speed
    return room, room > 0 and 0 or -room * speed < left and -room or huge
  end
  return room_of, overdue_s
end
