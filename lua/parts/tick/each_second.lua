--[[
tick/each_second: the work of the clock that looks at every worker, done once a second: which servers live, which
workers are to be forgotten, and the fleet's median speed.

Takes the keys alive, alive_servers, servers and load, the key prefix, the server's time, ttl_ms, forget_ms, whether
it is a time of grace, tick's answer (forget:<id> is added to it), and stream_of(key) -> length and last time of a
stream.
Returns the median speed (tokens/s; 0: none is known).
--]]
local call = redis.call
local FLAGS_AT, ROW_FLAGS_TO_SPEED_TPS, FLAG_SERVER, FLAG_APPROXIMATE = 21, ">I2I4I4", 1, 16 -- of a packed row
local FORGETS_AT_ONCE = 8
local with_flags, heard = include "shared/with_flags", include "shared/heard"

return function(ALIVE, ALIVE_SERVERS, SERVERS, LOAD, PREFIX, now, TTL_MS, FORGET_MS, grace, answer, stream_of)
  local function scores(key)
    local flat, score = call("ZRANGE", key, 0, -1, "WITHSCORES"), {}
    for i = 1, #flat, 2 do score[flat[i]] = tonumber(flat[i + 1]) end
    return score
  end

  -- Whether a name has been silent for forget_ms and its stream is empty. A name that said goodbye counts as silent
  -- since its last entry.
  local function forgettable(stream, seen)
    if seen and seen > now - FORGET_MS then return false end
    local length, ms = stream_of(PREFIX .. stream)
    if length ~= 0 then return not length end
    return ms < now - FORGET_MS or ms > now + FORGET_MS -- an id in the far future: the stream takes no entry any more
  end

  local alive, alive_servers = scores(ALIVE), scores(ALIVE_SERVERS)
  local rows, speeds, served, forgets = call("HGETALL", LOAD), {}, {}, 0
  local function forget_if_due(stream, seen, worker)
    if grace or forgets >= FORGETS_AT_ONCE or not forgettable(stream, seen) then return end
    forgets, answer[#answer + 1] = forgets + 1, "forget:" .. worker
  end
  for i = 1, #rows, 2 do
    local worker, row = rows[i], rows[i + 1]
    local flags, _, speed = struct.unpack(ROW_FLAGS_TO_SPEED_TPS, row, FLAGS_AT)
    if speed > 0 then speeds[#speeds + 1] = speed end
    if bit.band(flags, FLAG_APPROXIMATE) == 0 then
      local server = worker:match("^(.*)%.%d+$")
      served[server or worker] = true
      local up = heard(alive_servers[server or worker], now, TTL_MS)
      if up ~= (bit.band(flags, FLAG_SERVER) > 0) and (up or not grace) then
        call("HSET", LOAD, worker, with_flags(row, bit.bxor(flags, FLAG_SERVER)))
      end
      forget_if_due("events:" .. worker, alive[worker], worker)
    elseif alive[worker] then -- an approximate worker that its router found unhealthy is not in `alive`: it stays
      forget_if_due("events:" .. worker, alive[worker], worker)
    end
  end
  for _, server in ipairs(call("HKEYS", SERVERS)) do -- rank 0 stands for a server whose workers are all gone
    if not served[server] then forget_if_due("server:" .. server, alive_servers[server], server .. ".0") end
  end
  table.sort(speeds)
  return speeds[math.ceil(#speeds / 2)] or 0
end
