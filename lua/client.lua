--[[
client: checks and counts a request of a client whose key has limits, where the model has several pools. (For a model
of one pool, decide does so.) One of the pools keeps the client's counts for all of them.

Guarantee: check and count are one step, so all replicas together never exceed a limit. A request counts as in flight
until `end`, or until lease_ms after its last `admit` or `keep`. A repeated call changes nothing.

ARGV: prefix, verb, lease_ms, then
      for `admit`: id (with the client's tag at its end), limits (packed as for decide), tokens of the prompt
      for `keep`: ids (<= 200)
      for `end`: id, tokens to count besides those of the prompt (the answer's; below 0: tokens to give back)
Returns: `admit`: {requests of the client in flight, tokens that it has used}, both with this request, or
      {LIMITED, CONCURRENCY or TOKENS, how much of that limit is used, ms until the request may pass};
      `keep` and `end`: {number of requests that the call kept or ended}
Cost: O(ids * log requests in flight of the client)
Keys that depend on data: client:<tag>, tokens:<tag>
--]]
local leases_key = unpack(KEYS)
local prefix, verb, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local ID_PLACE, LIMITS_PLACE, PROMPT_PLACE, TOKENS_PLACE = 4, 5, 6, 5 -- positions in ARGV
local MAX_KEPT = 200
local call = redis.call

local last = verb == "keep" and #ARGV or ID_PLACE
for i = ID_PLACE, last do
  if #(ARGV[i] or "") < CLIENT_AT then return redis.error_reply("BAD_ARGUMENT client: an id without a client") end
end
if not lease_ms or last - ID_PLACE >= MAX_KEPT or verb ~= "keep" and not tonumber(ARGV[#ARGV])
    or verb == "admit" and #(ARGV[LIMITS_PLACE] or "") < LIMITS_BYTES then
  return redis.error_reply("BAD_ARGUMENT client: lease_ms, and what the verb takes")
end
local time = call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local client_of = include "shared/client_use"

call("ZREM", leases_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
if verb == "admit" then
  local client, prompt_tokens = client_of(prefix, ARGV[ID_PLACE], now), tonumber(ARGV[PROMPT_PLACE])
  local counted = client.counts()
  local per_minute, refused = (include "shared/client_limits")(client, ARGV[LIMITS_PLACE], prompt_tokens)
  if refused then return refused end
  client.hold(now + lease_ms)
  local used = per_minute and client.spend(counted and 0 or prompt_tokens, per_minute) or 0
  return { client.in_flight(), math.ceil(used) }
elseif verb == "keep" then
  for i = ID_PLACE, last do client_of(prefix, ARGV[i], now).renew(now + lease_ms) end
  return { last - ID_PLACE + 1 }
elseif verb == "end" then
  local client = client_of(prefix, ARGV[ID_PLACE], now)
  if not client.let_go() then return { 0 } end
  client.spend(tonumber(ARGV[TOKENS_PLACE]))
  return { 1 }
end
return redis.error_reply("BAD_ARGUMENT client: unknown verb " .. verb)
