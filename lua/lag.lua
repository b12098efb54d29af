--[[
lag: tells how far apply is behind: which workers' streams hold entries that no replica has applied.

Guarantee: reads only. Applied entries are trimmed, so every entry in a stream is one that no replica has applied.

ARGV: prefix, start, max_streams
Returns: {number of all streams, then for each worker's stream that is not empty: worker_id, number of entries, age of
      the oldest entry in ms}; looked at are max_streams streams from number start on
Cost: O(max_streams), 50 us at 64 idle streams, 330 us with a backlog in each
Keys that depend on data: events:<worker_id>
--]]
local cursor_key = unpack(KEYS)
local prefix, start, max_streams = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local call = redis.call
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local streams = call("HKEYS", cursor_key)
local answer = { #streams }
for at = start + 1, math.min(#streams, start + max_streams) do
  local stream = prefix .. streams[at]
  local worker = streams[at]:match("^events:(.+)$")
  local length = worker and redis.pcall("XLEN", stream) -- a key of a wrong type fails here; apply_control deletes it
  if type(length) == "number" and length > 0 then
    local first = call("XRANGE", stream, "-", "+", "COUNT", 1)[1][1]
    answer[#answer + 1] = worker
    answer[#answer + 1] = length
    answer[#answer + 1] = math.max(0, now - tonumber(first:match("^%d+")))
  end
end
return answer
