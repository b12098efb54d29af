--[[
shared/candidates: lists the workers that a decision may choose among, with the values of their load rows.

Guarantee: pure. A candidate is alive and routable: its API server lives, its URL answers, it is neither draining nor
hostile, its engine is not paused and serves the pool's name. An ejected worker is no candidate, a worker on trial
(eject) only while it has no request. A worker without heartbeats is alive while replicas vouch for it (vouch). A
candidate's blocks may be matched if it is proven or approximate; else only its load counts.
Takes every load row, the ids from shared/alive_workers, the fleet's median speed (tokens/s; a claimed speed counts as
1/8 of it at least and 4 times it at most), the replica's constants, the tokens of the prompt, the time in ms, the
tokens of a block (1: unknown), whether by_slot is wanted (`chained`), and whether base_s and busy_share are (`split`).
Returns the state of a decision. By candidate (entries beyond `count` are meaningless):
  rows; slots; unmatchable (true if its blocks may not be matched); cost (set by decide/cost_rule)
  wait (prefill tokens ahead); speed (tokens/s)
  base_s (seconds of work ahead); busy_share (share of its recent time spent in prefill)
  load_s (the part of the cost that no match changes: wait_price * base_s + place * busy_share * prompt / median speed)
  fill (share of its cache in use; 1 if the blocks may not be matched, as computed blocks then help no later prompt)
  crowd (caches that the booked contexts need beyond its own; nil: they fit; no table if they fit everywhere)
  decodes (requests in flight) and delays (seconds by which a prompt that must be computed whole delays their answers:
  slows in decide/cost_rule); no delays if both weights are 0
For all: by_slot (scheme -> slot -> candidate whose blocks may be matched), has_sets (whether any of these candidates
reports further sets of blocks: shared/further_sets), has_open (whether the set of any is not prefix-closed), count,
least_wait, total_fill, total_busy (sum of busy_share), total_filled (sum of the shares of caches that contexts need;
both set if delays is), constants, median, prompt, now.
--]]
local unpack_from, sub, band, exp, floor = struct.unpack, string.sub, bit.band, math.exp, math.floor
local MATCHABLE = FLAG_PROVEN + FLAG_APPROXIMATE

return function(all, alive, median, constants, prompt, now, block_tokens, chained, split)
  local block = block_tokens > 1 and block_tokens or VLLM_BLOCK_TOKENS
  local slowest, fastest = median / 8, median * 4
  local wait_price, decode_s_per_token = constants.wait_price, constants.decode_s_per_token
  local place_s = constants.place * prompt / median
  local count, least_wait, total_fill, rows = 0, math.huge, 0, all
  local load_s, speed, fill, usable, by_slot, unmatchable, crowd = {}, {}, {}, {}, {}, {}, nil
  local base_s, busy_share = split and {}, split and {}
  local context_price = constants.context_price
  local answer_price = (constants.decode_price + context_price) * prompt
  local delays, decodes, total_busy, total_filled = answer_price > 0 and {} or nil, {}, 0, 0
  local is_detailed = split or delays
  local has_sets, has_open = false, false

  -- Tell how a worker of this kind (flags and scheme, one number in ROW_BRIEF) may be used: "no"; "load" if its blocks
  -- may not be matched; else the table of by_slot for its scheme. Stored, except of workers on trial.
  local function use_of(kind, row)
    local flags, scheme, use = floor(kind / U32), kind % U32, "no"
    local on_trial = band(flags, FLAG_TRIAL) > 0
    if band(flags, ROUTABLE_MASK + FLAG_EJECTED) == ROUTABLE
        and not (on_trial and unpack_from(ROW_IN_FLIGHT, row, IN_FLIGHT_AT) > 0) then
      by_slot[scheme] = by_slot[scheme] or {}
      use = band(flags, MATCHABLE) ~= 0 and by_slot[scheme] or "load"
      has_sets = has_sets or use ~= "load" and band(flags, FLAG_SETS) ~= 0
      has_open = has_open or use ~= "load" and band(flags, FLAG_CLOSED + FLAG_PARTIAL) ~= FLAG_CLOSED
    end
    if not on_trial then usable[kind] = use end
    return use
  end

  for k = 1, #all do
    local row = all[k]
    local prefill, decode, flight_and_slot, kind, tps, foreign, foreign_decode, blocks, capacity, busy, going, since
      = unpack_from(ROW_BRIEF, row, BRIEF_AT)
    local use = usable[kind] or use_of(kind, row)
    if alive and use ~= "no" then
      local lives = alive[sub(row, WORKER_ID_AT)]
      if lives == nil then lives = band(floor(kind / U32), FLAG_UNHEARD) ~= 0 end
      if not lives then use = "no" end
    end
    if use ~= "no" and #row >= WORKER_ID_AT then
      count = count + 1
      if rows ~= all then rows[count] = row end
      if tps < slowest then tps = tps == 0 and median or slowest elseif tps > fastest then tps = fastest end
      local share = capacity > 0 and blocks / capacity or 0
      if use == "load" then
        share, unmatchable[count] = 1, true
      else
        if share > 1 then share = 1 end
        if chained then use[flight_and_slot % U32] = count end
      end
      speed[count], fill[count], total_fill = tps, share, total_fill + share
      -- Contexts beyond the size of the cache wait, or are computed again.
      local ahead, context, most = prefill + foreign, decode + foreign_decode, capacity * block
      if context > most and most > 0 then
        crowd = crowd or {}
        crowd[count] = context / most - 1
      end
      if ahead < least_wait then least_wait = ahead end
      if prefill > 0 or busy > 0 then
        local passed, target = (now - since) % U32, 0
        if prefill > 0 then
          -- Estimate the tokens computed of the prefill under way by time and speed, at most all of that prefill.
          local done = passed / 1000 * tps
          going, target = going % U32, BUSY_ALWAYS -- `going` has also what was evicted
          ahead = ahead - (done > going and going or done)
        end
        -- The same formula as in shared/busy_share, whose call for each worker took 5 % of a decision's time.
        if since > 0 and passed < PAST_MS then busy = target + (busy - target) * exp(-passed / BUSY_MEMORY_MS) end
      end
      -- Of requests that bypass the routers only waiting work is known: an engine with a second of that counts as busy.
      busy = busy / BUSY_ALWAYS + foreign / tps
      if busy > 1 then busy = 1 end
      local base = ahead / tps + decode_s_per_token * context
      load_s[count] = wait_price * base + place_s * busy
      if is_detailed then
        if split then base_s[count], busy_share[count] = base, busy end
        if delays then
          local n = (flight_and_slot - flight_and_slot % U32) / U32
          decodes[count], delays[count] = n, (context_price * context + answer_price * n) / tps
          total_busy = total_busy + busy
          if most > 0 then total_filled = total_filled + (context < most and context / most or 1) end
        end
      end
    elseif rows == all then
      rows = {}
      for i = 1, count do rows[i] = all[i] end
    end
  end

  -- A table by candidate whose values are read out of a row when they are first asked for.
  local function lazily(read)
    return setmetatable({}, { __index = function(values, i)
      local value = read(rows[i])
      values[i] = value
      return value
    end })
  end
  local slots = lazily(function(row) return (unpack_from(ROW_SLOT, row, SLOT_AT)) end)
  local wait = lazily(function(row)
    local foreign = unpack_from(ROW_FOREIGN_PREFILL_TOKENS, row, FOREIGN_PREFILL_TOKENS_AT)
    return foreign + unpack_from(ROW_PREFILL_TOKENS, row, PREFILL_TOKENS_AT)
  end)
  -- Name all fields that other parts set later (nil), so that the table gets its final size at once.
  return { rows = rows, wait = wait, base_s = base_s, speed = speed, fill = fill, crowd = crowd,
    busy_share = busy_share, slots = slots, unmatchable = unmatchable, by_slot = by_slot, count = count,
    delays = delays, decodes = decodes, total_busy = total_busy, total_filled = total_filled, decode_s = nil,
    load_s = load_s, cost = {}, least_wait = least_wait, total_fill = total_fill, median = median,
    constants = constants, prompt = prompt, now = now, waits = nil, policy = nil, seed = nil, prefix_tokens = nil,
    order = nil, objective_s = nil, turn = nil, flagged = nil, block = nil, matched = nil, speculated = nil,
    confirmed = nil, chain_of = nil, counted = nil, node = nil, replace = nil, tie_s = nil, room = nil, terms = nil,
    turn_s = nil, turn_at = nil, has_sets = has_sets, has_open = has_open, last_end = nil, tiers = nil }
end
