--[[
vouch: keeps a worker routable whose engine answers a replica over HTTP, though its heartbeats are missing. The plugin's
connection to Redis is broken, not the engine, so decide goes on to use the worker's last known blocks.

Guarantee: counts only for the process that was asked: with another nonce it changes nothing. Refused is a worker
whose URL never answered a probe, that left, or that broke the rules. So is one whose API server sent heartbeats long
after its core: the core stands still, though the server answers over HTTP. The flag UNHEARD, which this script sets,
ends ttl_ms after the last vouch, or when heartbeats arrive again (tick).

ARGV: worker_id, nonce
Returns: VOUCHED, RENEWED (the worker had the flag UNHEARD already), or REFUSED (nothing is changed)
Cost: O(1)
--]]
local workers_key, load_key, alive_key, alive_servers_key = unpack(KEYS)
local worker_id, nonce = ARGV[1], ARGV[2]

local SERVER_ALONE_MS = 6500 -- longest time that a server's heartbeat may follow its core's last (interval: 5 s)
local call, with_flags = redis.call, include "shared/with_flags"

local packed, row = call("HGET", workers_key, worker_id), call("HGET", load_key, worker_id)
local core_ms = tonumber(call("ZSCORE", alive_key, worker_id) or "")
local server_ms = tonumber(call("ZSCORE", alive_servers_key, worker_id:match("^(.*)%.%d+$") or "") or "")
if not (packed and row and core_ms and server_ms) or server_ms - core_ms > SERVER_ALONE_MS then return "REFUSED" end
local record, flags = cjson.decode(packed), struct.unpack(ROW_FLAGS, row, FLAGS_AT)
if record.nonce ~= nonce or bit.band(flags, FLAG_URL + FLAG_HOSTILE) ~= FLAG_URL then return "REFUSED" end

local time = call("TIME")
record.vouched = time[1] * 1000 + math.floor(time[2] / 1000)
call("HSET", workers_key, worker_id, cjson.encode(record))
call("HSET", load_key, worker_id, with_flags(row, bit.bor(flags, FLAG_UNHEARD + FLAG_SERVER)))
return bit.band(flags, FLAG_UNHEARD) > 0 and "RENEWED" or "VOUCHED"
