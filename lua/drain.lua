--[[
drain: the operator takes a worker out of rotation, or puts it back. It finishes what it has and gets no new request.

Guarantee: from this call on `decide` does not choose the worker, whichever replica asks, until the flag is taken back
or the worker is forgotten: a join, a heartbeat and a probe keep it. Works at the memory limit. Needs nothing of the
worker, so it works for stock engines too.

KEYS: load
ARGV: worker_id, draining (0/1)
Returns: 1, or 0 if the worker has no row
Cost: O(1)
--]]
local load_key, worker_id, draining = KEYS[1], ARGV[1], ARGV[2]
local DRAINING = 8 -- flag of a row

if draining ~= "0" and draining ~= "1" then return redis.error_reply("BAD_ARGUMENT drain: 0 or 1") end
redis.call("HDEL", load_key, "") -- after a write that takes no memory, a full Redis allows the others
local row = redis.call("HGET", load_key, worker_id)
if not row then return 0 end
local flags = struct.unpack(">I2", row, 21)
flags = draining == "1" and bit.bor(flags, DRAINING) or bit.band(flags, bit.bnot(DRAINING))
redis.call("HSET", load_key, worker_id, row:sub(1, 20) .. struct.pack(">I2", flags) .. row:sub(23))
return 1
