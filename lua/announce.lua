--[[
announce: notes what one replica tells of itself, with the time of the server; or takes it out, as it stops.

Guarantee: no entry is older than forget_ms, and there are at most 256; of more, those that were silent longest go. The
key goes with its last entry. A replica that is started again at the same place has the entry of the one before.

KEYS: replicas
ARGV: name (of its place: host and port), record (JSON, at most 8,192 bytes; empty: it stops), forget_ms
Returns: how many replicas are noted
Cost: O(replicas)
--]]
local REPLICAS = KEYS[1]
local NAME, RECORD, FORGET_MS = ARGV[1], ARGV[2], tonumber(ARGV[3])
local MOST, MAX_BYTES = 256, 8192

local call = redis.call
if NAME == "" or #RECORD > MAX_BYTES or not FORGET_MS then
  return redis.error_reply("BAD_ARGUMENT announce: a name, a record of at most 8192 bytes, and a time in ms")
end
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
call("HDEL", REPLICAS, "") -- a first write that takes no memory: a full Redis then allows the writes after it
if RECORD == "" then
  call("HDEL", REPLICAS, NAME)
else
  call("HSET", REPLICAS, NAME, string.format("%.0f %s", now, RECORD))
  call("EXPIRE", REPLICAS, math.ceil(FORGET_MS / 1000))
end
local flat, noted = call("HGETALL", REPLICAS), {}
for i = 1, #flat, 2 do
  local at = tonumber(flat[i + 1]:match("^%d+")) or 0
  if at < now - FORGET_MS or at > now then
    call("HDEL", REPLICAS, flat[i])
  else
    noted[#noted + 1] = { at, flat[i] }
  end
end
table.sort(noted, function(a, b) return a[1] > b[1] end)
for i = MOST + 1, #noted do call("HDEL", REPLICAS, noted[i][2]) end
return math.min(#noted, MOST)
