--[[
drain: takes a worker out of rotation for the operator, or puts it back. A drained worker finishes its requests and
gets no new one.

Guarantee: from this call on decide does not choose the worker, whichever replica asks, until the flag is taken back or
the worker is forgotten: a join, a heartbeat and a probe leave the flag set. Works at the memory limit.

ARGV: worker_id, draining (0/1)
Returns: 1, or 0 if the worker has no row
Cost: O(1)
--]]
local load_key = unpack(KEYS)
local worker_id, draining = ARGV[1], ARGV[2]
local with_flags = include "shared/with_flags"

if draining ~= "0" and draining ~= "1" then return redis.error_reply("BAD_ARGUMENT drain: 0 or 1") end
redis.call("HDEL", load_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
local row = redis.call("HGET", load_key, worker_id)
if not row then return 0 end
local flags = struct.unpack(ROW_FLAGS, row, FLAGS_AT)
flags = draining == "1" and bit.bor(flags, FLAG_DRAINING) or bit.band(flags, bit.bnot(FLAG_DRAINING))
redis.call("HSET", load_key, worker_id, with_flags(row, flags))
return 1
