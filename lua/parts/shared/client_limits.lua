--[[
shared/client_limits: whether the limits of a client's key let one more request in.

Guarantee: the check and the booking are one step of the script, so all replicas together never go over a limit. A
request that has a ticket is in flight already, and is not checked again. Nor is one that was admitted before: another
attempt at a request whose worker failed. So a client may have one more in flight than its limit, if another request
came in between.
Takes the client (shared/client_use), its limits (packed: requests in flight, tokens per minute, 0: no such limit; a
further byte: admitted before) and the tokens of the prompt. Returns the tokens per minute (nil: no limit); or nil and
the answer {LIMITED, CONCURRENCY or TOKENS, what is used of it, ms until the request may pass (0: not known)}.
A prompt that is longer than the limit passes when no token is used; the client then waits until it is paid back.
--]]

return function(client, limits, prompt_tokens)
  local concurrency, per_minute = struct.unpack(LIMITS, limits)
  local rate = per_minute > 0 and per_minute or nil
  if client.counts() or #limits > LIMITS_BYTES then return rate end
  local in_flight = concurrency > 0 and client.in_flight() or 0
  if concurrency > 0 and in_flight >= concurrency then return nil, { "LIMITED", "CONCURRENCY", in_flight, 0 } end
  local used = rate and client.spend(0) or 0
  local over = rate and used + math.min(prompt_tokens, rate) - rate or 0
  if over > 0 then return nil, { "LIMITED", "TOKENS", math.ceil(used), math.ceil(over * MINUTE_MS / rate) } end
  return rate
end
