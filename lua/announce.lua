--[[
announce: stores a replica's record of itself with the server's time, or deletes the record when the replica stops.

Guarantee: no record is older than forget_ms, and at most 256 are stored: beyond that the oldest are deleted. The key
expires with its last record. A replica that is started again at the same host and port overwrites the earlier record.

ARGV: name (host and port of the replica), record (JSON, at most 8,192 bytes; empty: the replica stops), forget_ms
Returns: number of replicas that have a record
Cost: O(replicas)
--]]
local replicas_key = unpack(KEYS)
local name, record, forget_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local MOST, MAX_BYTES = 256, 8192

local call = redis.call
if name == "" or #record > MAX_BYTES or not forget_ms then
  return redis.error_reply("BAD_ARGUMENT announce: a name, a record of at most 8192 bytes, and a time in ms")
end
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
call("HDEL", replicas_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
if record == "" then
  call("HDEL", replicas_key, name)
else
  call("HSET", replicas_key, name, string.format("%.0f %s", now, record))
  call("EXPIRE", replicas_key, math.ceil(forget_ms / 1000))
end
local flat, noted = call("HGETALL", replicas_key), {}
for i = 1, #flat, 2 do
  local at = tonumber(flat[i + 1]:match("^%d+")) or 0
  if at < now - forget_ms or at > now then
    call("HDEL", replicas_key, flat[i])
  else
    noted[#noted + 1] = { at, flat[i] }
  end
end
table.sort(noted, function(a, b) return a[1] > b[1] end)
for i = MOST + 1, #noted do call("HDEL", replicas_key, noted[i][2]) end
return math.min(#noted, MOST)
