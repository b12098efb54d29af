--[[
prove: writes the result of a probe to the worker's record and row, or notes that a replica warms the worker up first.

Guarantee: a result counts only for the incarnation that was probed: with another nonce it changes nothing. If two
probes ran at a time, a failure does not undo a success: a failure counts only if no result was recorded since its probe
began. One replica warms an incarnation up, once: while its warming lease lives, no other replica's result counts, and
after the lease has ended, its own does not.
proven: the URL answers and the worker's blocks may be matched. identity: routable, by load only. url, pending: not
routable. warming: the replica `owner` found the worker proven and warms it up, so it is not routable yet.
Any result ends a suspicion (see apply). `tries` counts results in a row that left the proof open: failures, and
suspicions that were wrong. The higher `tries`, the longer a replica waits before the next probe.

ARGV: worker_id, nonce, proof (pending, proven, identity, url, warming), cause (a word for counters, or empty),
      reason (a sentence for people), probed (`probed` of the record, in ms, when the probe began; 0: none; empty: the
      result counts in any case), owner (the replica whose warming begins, goes on or ends; empty: none),
      lease_ms (of a warming, renewed by each call of its owner)
Returns: OK, DOWNGRADED (no longer proven), STALE (not recorded) or TAKEN (another replica warms the worker, or did)
Cost: O(1)
--]]
local workers_key, load_key, counts_key = unpack(KEYS)
local worker_id, nonce, proof, cause, reason = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local probed, owner, lease_ms = ARGV[6], ARGV[7], tonumber(ARGV[8])

local FLAGS = { pending = 0, proven = FLAG_URL + FLAG_PROVEN, identity = FLAG_URL, url = 0, warming = 0 }
local with_flags = include "shared/with_flags"

if not FLAGS[proof] or not lease_ms then return redis.error_reply("BAD_ARGUMENT unknown proof " .. proof) end
local packed, row = redis.call("HGET", workers_key, worker_id), redis.call("HGET", load_key, worker_id)
if not packed or not row then return "STALE" end
local record = cjson.decode(packed)
if record.nonce ~= nonce then return "STALE" end
if proof ~= "proven" and probed ~= "" and (record.probed or 0) ~= tonumber(probed) then return "STALE" end

local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lease = record.warming -- kept after its end, to show that this incarnation was warmed
local lives = lease and record.proof == "warming" and now < lease.ends
local mine = lives and lease.owner == owner
if lives and not mine or owner ~= "" and not mine and (proof ~= "warming" or lease) then return "TAKEN" end
if proof == "warming" then
  if not mine and record.proof ~= "pending" and record.proof ~= "url" then return "TAKEN" end
  record.warming = { owner = owner, ends = now + lease_ms }
end
if not (mine and proof == "warming") then redis.call("HINCRBY", counts_key, "proof_" .. proof, 1) end
local downgraded = record.proof == "proven" and proof ~= "proven"
local settled = proof == "proven" and not record.suspect
record.tries = settled and 0 or downgraded and 1 or (record.tries or 0) + 1
record.proof, record.cause, record.reason, record.suspect, record.strikes = proof, cause, reason, nil, nil
record.probed = now
redis.call("HSET", workers_key, worker_id, cjson.encode(record))
local flags = struct.unpack(ROW_FLAGS, row, FLAGS_AT)
flags = bit.bor(bit.band(flags, bit.bnot(FLAG_URL + FLAG_PROVEN)), FLAGS[proof])
redis.call("HSET", load_key, worker_id, with_flags(row, flags))
if not downgraded then return "OK" end
redis.call("HINCRBY", counts_key, "downgrade_" .. cause, 1)
return "DOWNGRADED"
