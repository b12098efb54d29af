--[[
prove: the result of a join probe, written to the worker's record and to its row.

Guarantee: counts only for the incarnation that was probed: another nonce changes nothing.
proven: its URL answers and its blocks may be matched. identity: routable, by load only. url, pending: not routable.

KEYS: workers load counts
ARGV: worker_id, nonce, proof (pending, proven, identity, url), reason (a line for people)
Returns: OK or STALE
Cost: O(1)
--]]
local workers_key, load_key, counts_key = KEYS[1], KEYS[2], KEYS[3]
local worker_id, nonce, proof, reason = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local URL, PROVEN = 2, 4
local FLAGS = { pending = 0, proven = URL + PROVEN, identity = URL, url = 0 }

if not FLAGS[proof] then return redis.error_reply("BAD_ARGUMENT unknown proof " .. proof) end
local packed, row = redis.call("HGET", workers_key, worker_id), redis.call("HGET", load_key, worker_id)
if not packed or not row then return "STALE" end
local record = cjson.decode(packed)
if record.nonce ~= nonce then return "STALE" end

record.proof, record.reason = proof, reason
redis.call("HSET", workers_key, worker_id, cjson.encode(record))
local flags = struct.unpack(">I2", row, 21)
flags = bit.bor(bit.band(flags, bit.bnot(URL + PROVEN)), FLAGS[proof])
redis.call("HSET", load_key, worker_id, row:sub(1, 20) .. struct.pack(">I2", flags) .. row:sub(23))
redis.call("HINCRBY", counts_key, "proof_" .. proof, 1)
return "OK"
