--[[
shared/candidates: lists the workers that a decision may choose among, with the values of their load rows.

Guarantee: pure. A candidate is alive and routable: its API server lives, its URL answers, it is neither draining nor
hostile, its engine is not paused and serves the pool's name. An ejected worker is no candidate, a worker on trial
(eject) only while it has no request. A worker without heartbeats is alive while replicas vouch for it (vouch). A
candidate's blocks may be matched if it is proven or approximate; else only its load counts.
Takes every load row, the ids from shared/alive_workers, the fleet's median speed (tokens/s; a claimed speed counts as
1/8 of it at least and 4 times it at most), decode_s_per_token, the time in ms, and the tokens of a block (1: unknown).
Returns the state of a decision. By candidate (entries beyond `count` are meaningless):
  rows; slots; schemes (-1: the blocks may not be matched); cost (set by decide/cost_rule)
  wait (prefill tokens ahead); base_s (seconds of work ahead); speed (tokens/s)
  busy_share (share of its recent time spent in prefill)
  fill (share of its cache in use; 1 if the blocks may not be matched, as computed blocks then help no later prompt)
  crowd (caches that the booked contexts need beyond its own; nil: they fit; no table if they fit everywhere)
For all: count, least_wait, total_fill, median, now; usable: flags -> "match", "load" or "no".
--]]
local unpack_from, sub, band, exp = struct.unpack, string.sub, bit.band, math.exp
local MATCHABLE = FLAG_PROVEN + FLAG_APPROXIMATE
local MAX_PREFILLED = 4096 -- unpack takes no more

return function(all, alive, median, decode_s_per_token, now, block_tokens)
  local block = block_tokens > 1 and block_tokens or VLLM_BLOCK_TOKENS
  local slowest, fastest = median / 8, median * 4
  local count, least_wait, total_fill = 0, math.huge, 0
  -- Lua rehashes a growing table at each power of two: copying `all` gives the tables their final size at once.
  local some, usable, crowd = #all <= MAX_PREFILLED and all or {}, {}, nil
  local rows, wait, base_s, slots = { unpack(some) }, { unpack(some) }, { unpack(some) }, { unpack(some) }
  local speed, fill, cost, schemes = { unpack(some) }, { unpack(some) }, { unpack(some) }, { unpack(some) }
  local busy_share = { unpack(some) }
  for k = 1, #all do
    local row = all[k]
    local prefill, decode, flight, slot, flags, scheme, tps, foreign, foreign_decode, blocks, capacity, busy, _, going,
      since = unpack_from(ROW_PREFILL_TOKENS_TO_SINCE_MS, row, PREFILL_TOKENS_AT)
    local use = usable[flags]
    if not use then
      use = band(flags, ROUTABLE_MASK + FLAG_EJECTED) ~= ROUTABLE and "no"
        or band(flags, MATCHABLE) ~= 0 and "match" or "load"
      usable[flags] = use
    end
    local lives = not alive or alive[sub(row, WORKER_ID_AT)]
    if lives == nil then lives = band(flags, FLAG_UNHEARD) ~= 0 end
    if flight > 0 and flags >= FLAG_TRIAL and band(flags, FLAG_TRIAL) > 0 then lives = false end
    if lives and use ~= "no" and #row >= WORKER_ID_AT then
      if tps < slowest then tps = tps == 0 and median or slowest elseif tps > fastest then tps = fastest end
      local ahead, share = prefill + foreign, use == "load" and 1 or capacity > 0 and blocks / capacity or 0
      if share > 1 then share = 1 end
      local context, most = decode + foreign_decode, capacity * block
      -- Contexts beyond the size of the cache wait, or are computed again.
      count, total_fill = count + 1, total_fill + share
      if context > most and most > 0 then
        crowd = crowd or {}
        crowd[count] = context / most - 1
      end
      if ahead < least_wait then least_wait = ahead end
      rows[count], wait[count], speed[count], fill[count] = row, ahead, tps, share
      slots[count], schemes[count] = slot, use == "match" and scheme or -1
      -- Estimate the tokens computed of the prefill under way by time and speed, at most all of that prefill (`going`).
      local done = 0
      if prefill > 0 or busy > 0 then
        local passed, target = (now - since) % U32, 0
        if prefill > 0 then
          done, target = passed / 1000 * tps, BUSY_ALWAYS
          if done > going then done = going end
        end
        -- The same formula as in shared/busy_share, whose call for each worker took 5 % of a decision's time.
        if since > 0 and passed < PAST_MS then busy = target + (busy - target) * exp(-passed / BUSY_MEMORY_MS) end
      end
      -- Of requests that bypass the routers only waiting work is known: an engine with a second of that counts as busy.
      busy = busy / BUSY_ALWAYS + foreign / tps
      busy_share[count] = busy < 1 and busy or 1
      base_s[count] = (ahead - done) / tps + decode_s_per_token * context
    end
  end
  -- Name all fields that other parts set later (nil), so that the table gets its final size at once.
  return { rows = rows, wait = wait, base_s = base_s, speed = speed, fill = fill, crowd = crowd,
    busy_share = busy_share, slots = slots, schemes = schemes, count = count,
    usable = usable, cost = cost, least_wait = least_wait, total_fill = total_fill, median = median,
    now = now, waits = nil, constants = nil, policy = nil, prompt = nil, seed = nil, prefix_tokens = nil, order = nil,
    objective_s = nil, turn = nil, flagged = nil, block = nil, matched = nil, speculated = nil, confirmed = nil,
    chain_of = nil, counted = nil, node = nil, replace = nil, tie_s = nil, room = nil, terms = nil,
    turn_s = nil, turn_at = nil }
end
