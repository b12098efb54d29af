--[[
shared/room: tells how much more prefill may be booked at an engine.

An engine has room while its booked prefill, less what it has computed of the prefill under way, takes less than
limit_s. It has no room while its booked context fills 95 % of its cache and some booked prefill is still to be
computed. (Bookings are estimates: only prefill that does not start shows that the cache is full.) A worker without any
work always has room. So has a worker without the plugin, whose speed and ends of prefill are not known, unless its
metrics told of requests that will still wait at the next check. Foreign prefill (of requests from elsewhere) takes room
only beyond REMEMBERED_S of work: up to that, an engine's report may be a mean of the past though nothing is left to
compute (worker_plugin, load.py), and the engine would stand idle while requests wait.

Guarantee: pure. Takes the state of shared/candidates, limit_s, and block_sizes (scheme=tokens, joined by commas).
Returns two functions:
room_of(candidate): seconds of prefill that may still be booked there (0 or less: no room), and seconds until it will
  have room if it goes on at its speed (math.huge: not predictable).
overdue_s(candidate): seconds since all its prefill should have ended by its speed (0: not overdue, or the clock
  stepped back). An overdue engine stands still, or its cache is full.
--]]
local unpack_from, band, max, min, huge = struct.unpack, bit.band, math.max, math.min, math.huge
local LEAST_ROOM_S = 1e-6 -- the least room of an engine without any work, whatever limit_s is
local REMEMBERED_S = 1.0 -- equals REMEMBERED_WORK_SECONDS of the plugin

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
    local block_tokens = sizes[scheme] or tonumber((("," .. block_sizes):match("," .. scheme .. "=(%d+)"))) or 0
    sizes[scheme] = block_tokens
    local cache = blocks * block_tokens * FULL_SHARE
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
