--[[
eject: takes a replica's verdict on a worker, made from the worker's answers. A worker that fails requests which others
serve is ejected: decide does not choose it for some time, longer after each ejection. Then the worker is on trial
(tick): decide gives it one request at a time, and the result of that request is the next verdict.

Guarantee: never are more than half of the routable workers ejected or on trial, whatever the replicas say: what many
workers fail is not the fault of one. A verdict `good` ends a trial, but no ejection. The number of a worker's ejections
is reset EJECTIONS_KEPT_MS after the end of the last one.

ARGV: worker_id, good (0/1), first_ms (length of a first ejection), most_ms (greatest length of any ejection)
Returns: EJECTED, READMITTED, REFUSED (half of the workers are ejected or on trial) or SAME (nothing is changed)
Cost: O(workers)
--]]
local load_key, ejections_key = unpack(KEYS)
local worker_id, good, first_ms, most_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local call, band, with_flags = redis.call, bit.band, include "shared/with_flags"

if not first_ms or not most_ms then return redis.error_reply("BAD_ARGUMENT eject: two numbers of ms") end
local row = call("HGET", load_key, worker_id)
local flags = row and struct.unpack(ROW_FLAGS, row, FLAGS_AT) or 0
if good == "1" then
  if band(flags, FLAG_TRIAL) == 0 then return "SAME" end
  call("HSET", load_key, worker_id, with_flags(row, flags - FLAG_TRIAL))
  return "READMITTED"
end
if not row or band(flags, FLAG_EJECTED) ~= 0 then return "SAME" end

local routable, out = 0, 1 -- `out` counts this worker, too
for _, other in ipairs(call("HVALS", load_key)) do
  local theirs = struct.unpack(ROW_FLAGS, other, FLAGS_AT)
  if band(theirs, ROUTABLE_MASK) == ROUTABLE then
    routable = routable + 1
    if other ~= row and band(theirs, FLAG_EJECTED + FLAG_TRIAL) ~= 0 then out = out + 1 end
  end
end
if out * 2 > routable then return "REFUSED" end

local time = call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local until_ms, times = (call("HGET", ejections_key, worker_id) or ""):match("^(%d+) (%d+)$")
times = until_ms and now - until_ms < EJECTIONS_KEPT_MS and times + 1 or 1
local lasts_ms = math.min(first_ms * 2 ^ math.min(times - 1, 16), most_ms)
call("HSET", ejections_key, worker_id, string.format("%.0f %.0f", now + lasts_ms, times))
call("HSET", load_key, worker_id, with_flags(row, flags - band(flags, FLAG_TRIAL) + FLAG_EJECTED))
return "EJECTED"
