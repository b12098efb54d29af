--[[
shared/client_limits: tells whether the limits of a client's key admit one more request.

Guarantee: the calling script checks and books in one step, so all replicas together never exceed a limit. A request
that has a ticket is not checked, because it counts as in flight already; nor is one that was admitted, but failed at
its worker and is tried again. If another request came in between, the client is then one above its limit.
Takes the client (shared/client_use), its limits (packed: requests in flight, tokens per minute, 0: no such limit; a
further byte: admitted before) and the tokens of the prompt. Returns the limit of tokens per minute (nil: none); or nil
and the answer {LIMITED, CONCURRENCY or TOKENS, how much of that limit is used, ms until the request may pass (0:
unknown)}. A prompt longer than the limit passes when no token is used; the next one waits until that is paid back.
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
