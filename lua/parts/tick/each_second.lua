--[[
tick/each_second: what takes a look at all workers, once a second: whose server lives, who is to be forgotten, the
median
speed.

Takes the keys alive, alive_servers, servers and load, the key prefix, the server's time, ttl_ms and forget_ms, whether
it is grace, tick's answer (forget:<id> is added), and what tells length and last time of a stream. Gives the median.
--]]
local call = redis.call
local SERVER, APPROXIMATE, FORGETS = 1, 16, 8 -- two flags; at once

return function(ALIVE, ALIVE_SERVERS, SERVERS, LOAD, PREFIX, now, TTL_MS, FORGET_MS, grace, answer, stream_of)
  local function scores(key)
    local flat, of = call("ZRANGE", key, 0, -1, "WITHSCORES"), {}
    for i = 1, #flat, 2 do of[flat[i]] = tonumber(flat[i + 1]) end
    return of
  end

  -- Silent for forget_ms, nothing unread in its stream. Who said goodbye is silent since its last entry.
  local function forgettable(stream, seen)
    if seen and seen > now - FORGET_MS then return false end
    local length, ms = stream_of(PREFIX .. stream)
    if length ~= 0 then return not length end
    return ms < now - FORGET_MS or ms > now + FORGET_MS -- in the future: nobody can write to it any more
  end

  local alive, alive_servers = scores(ALIVE), scores(ALIVE_SERVERS)
  local rows, speeds, served, forgets = call("HGETALL", LOAD), {}, {}, 0
  local function forget_if_due(stream, seen, worker)
    if grace or forgets >= FORGETS or not forgettable(stream, seen) then return end
    forgets, answer[#answer + 1] = forgets + 1, "forget:" .. worker
  end
  for i = 1, #rows, 2 do
    local worker, row = rows[i], rows[i + 1]
    local flags, _, speed = struct.unpack(">I2I4I4", row, 21)
    if speed > 0 then speeds[#speeds + 1] = speed end
    if bit.band(flags, APPROXIMATE) == 0 then
      local server = worker:match("^(.*)%.%d+$")
      served[server or worker] = true
      local up = (alive_servers[server or worker] or -1) >= now - TTL_MS
      if up ~= (bit.band(flags, SERVER) > 0) and (up or not grace) then
        call("HSET", LOAD, worker, row:sub(1, 20) .. struct.pack(">I2", bit.bxor(flags, SERVER)) .. row:sub(23))
      end
      forget_if_due("events:" .. worker, alive[worker], worker)
    elseif alive[worker] then -- one that its router calls unhealthy is not in `alive`, and stays
      forget_if_due("events:" .. worker, alive[worker], worker)
    end
  end
  for _, server in ipairs(call("HKEYS", SERVERS)) do -- rank 0 stands for a server whose workers are all gone
    if not served[server] then forget_if_due("server:" .. server, alive_servers[server], server .. ".0") end
  end
  table.sort(speeds)
  return speeds[math.ceil(#speeds / 2)] or 0
end
