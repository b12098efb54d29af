--[[
shared/constants: unpacks the constants of a replica (weights, times, limits, label prices, block sizes), which are one
packed argument of its calls.

Guarantee: pure. A record of another version, or a truncated one, is refused.
Takes the record as app/warmfleet/fleet/constants.py packs it: version (1 byte), then the fields in the order of the
assignment below, then `priced` prices of labels (slot, seconds), then `handing` roles (slot, gives, takes, alone), then
block_sizes as text (scheme=tokens, joined by commas).
Returns the fields by name; label_prices as slot -> seconds (nil: none); roles as slot -> role (nil: none), of engines
that hand prompts over: gives (its class, one bit: the same for all that may hand to the same engines; 0: it hands over
none), takes (the sum of the classes that may hand to it), alone (whether it also serves requests alone); or nil and
the error to answer with (BAD_ARGUMENT).
--]]

return function(record)
  if not record or #record < CONSTANTS_BYTES or record:byte() ~= CONSTANTS_VERSION then
    return nil, redis.error_reply("BAD_ARGUMENT the constants of this replica are not of version " .. CONSTANTS_VERSION)
  end
  local _, lease_ms, ttl_ms, ticket_ms, max_probes, lambda, kappa, pressure_price, decode_s_per_token,
    wait_price, stay, place, decode_price, context_price, min_match_tokens,
    queue_max, max_engine_wait_s, patience, paused_max_ms, held_max_ms, priced, handing, at =
    struct.unpack(CONSTANTS, record)
  local label_prices = priced > 0 and {} or nil
  for _ = 1, priced do
    local slot, seconds
    slot, seconds, at = struct.unpack(LABEL_PRICE, record, at)
    label_prices[slot] = seconds
  end
  local roles = handing > 0 and {} or nil
  for _ = 1, handing do
    local slot, gives, takes, alone
    slot, gives, takes, alone, at = struct.unpack(HANDING, record, at)
    roles[slot] = { gives = gives, takes = takes, alone = alone == 1 }
  end
  return {
    lease_ms = lease_ms, ttl_ms = ttl_ms, ticket_ms = ticket_ms, max_probes = max_probes, lambda = lambda,
    kappa = kappa, pressure_price = pressure_price, decode_s_per_token = decode_s_per_token, wait_price = wait_price,
    stay = stay, place = place, decode_price = decode_price, context_price = context_price,
    min_match_tokens = min_match_tokens, queue_max = queue_max, max_engine_wait_s = max_engine_wait_s,
    patience = patience, paused_max_ms = paused_max_ms, held_max_ms = held_max_ms, label_prices = label_prices,
    roles = roles, block_sizes = record:sub(at),
  }
end
