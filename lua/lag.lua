--[[
lag: how far apply is behind: which workers' streams hold entries that no replica has applied.

Guarantee: reads only. Applied entries are trimmed, so every entry of a stream waits.

KEYS: cursor
ARGV: prefix, start, max_streams
Returns: {number of streams, worker_id, entries, age of the oldest in ms, ...}; of streams that are not empty, among
      max_streams of them from start on
Cost: O(max_streams), 50 us at 64 idle streams, 330 us with a backlog in each
Keys that depend on data: events:<worker_id>
--]]
local CURSOR, PREFIX, START, MAX_STREAMS = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local call = redis.call
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local streams = call("HKEYS", CURSOR)
local answer = { #streams }
for at = START + 1, math.min(#streams, START + MAX_STREAMS) do
  local stream = PREFIX .. streams[at]
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
