--[[
decide/joint: prices a request in a fleet whose engines hand prompts over: a candidate serves it alone, or computes its
prompt for a partner, which takes the blocks and makes the answer (a pair). cost_rule uses this part only if the
replica's constants name engines with roles, and the request may be split.

Seconds beyond the costs that cost_rule has found (wait, uncached tokens, loads, staying, busy, labels):
  alone  full + harm * n * compute + ANSWER_PRICE * answering
  pair   at the first: full blocks + harm * n * compute (only where engines also serve alone)
         + max(transfer, full at the partner) + step at the partner + ANSWER_PRICE * answering at the partner
         + what is left by then of the partner's own prefill
  n          requests in flight there
  compute    uncached / speed: a prefill delays the answers beside it
  step       one step of decoding: (STEP_TOKENS + PER_CONTEXT * tokens of the contexts booked there) / speed
  answering  answer * (step + (n + 1) * PER_CONTEXT * prompt / speed) / (1 - busy_share): the answer's own seconds, and
             those by which its context delays other answers. `answer` are the tokens that are expected of it. Where
             prompts are computed for a share of the time (MOST_BUSY at most), answers take that much longer. Without
             it, engines of which some may compute for others and serve alone would all do both, and gain nothing
  full       until context, prompt and answer fit into FITS of the cache, as contexts leave when their answers end:
             over / context * answer * step
  full blocks  over / speed: at the first of a pair, contexts leave when partners take them. Blocks stay booked there
             until they are taken, or their lease ends
  transfer   what the partner's GPU lacks of the prompt, times the seconds per token of this link (settle/learn_link),
             and HANDOVER_S. While nothing is learned of the link, a token takes LINK_GUESS of the time to compute it
  busy       of cost_rule's term for busy_share only what exceeds the least of those who may serve alone, or may be
             first: engines that compute for others are always busier, and a session's later prompts go there as well
  harm       HARM if some engine of the fleet has one role only; else HARM_OF_BOTH, since a higher price would send all
             prompts to few engines. By simulation 1 is harmful everywhere; with 0, fleets with few decode engines fail
             at a lower load
A pair costs the sum of a term of the first, a term of the partner, and little that needs both. So no search is needed:
of the candidates that may be first the MOST_OF_KIND cheapest are looked at, with the MOST_OF_KIND cheapest partners of
each. A pair must be cheaper than serving alone by more than what counts as equal.

Guarantee: reads the key links at most; else pure. A candidate that may not serve alone and finds no partner costs
infinitely much. If all do, roles do not count, because an engine of the wrong role is better than none.
Takes the state, useful matches by candidate, and the seconds that count as equal. Of the state it reads also roles
(shared/constants), answer, and links_key or links (the field of the key -> seconds per token; for a replay).
Sets in the state: cost; partner (by candidate; nil: it serves alone); links; decode_s (harm by candidate); with s.terms
  best  the best of each kind: {candidate, partner or 0, cost, and of a pair: transfer, full at the partner, step and
        answers there, what is left of its own prefill}
  towards(candidate): sets cost and partner for the cheapest way in which this candidate makes the answer; returns the
        candidate that computes the prompt
  useless(barred): adds to ids, joined by commas, those of candidates that cost infinitely much
Returns the lowest cost, its candidate, and a set of the candidates among which ties are decided (nil: all).
--]]
local max, min, huge, unpack_from, band = math.max, math.min, math.huge, struct.unpack, bit.band
local HARM, HARM_OF_BOTH, ANSWER_PRICE = 0.3, 0.1, 0.1
local MOST_BUSY = 0.9
local STEP_TOKENS, PER_CONTEXT = 230, 0.0015 -- of a decode step, in tokens computed in its time: base, per token
local BUSY_TERM = 6 -- index of the term of busy_share in s.terms
local FITS, HANDOVER_S, MOST_OF_KIND = 0.97, 0.005, 8

-- Keep the MOST_OF_KIND lowest of a list by their values; of equals the lowest slots.
local function cheapest_of(list, value, slots)
  table.sort(list, function(a, b)
    if value[a] ~= value[b] then return value[a] < value[b] end
    return slots[a] < slots[b]
  end)
  for k = #list, MOST_OF_KIND + 1, -1 do list[k] = nil end
  return list
end

return function(s, own, equal_s)
  local prompt, count, roles, slots, cost = s.prompt, s.count, s.roles, s.slots, s.cost
  local answer, tiers, guess = s.answer, s.tiers, LINK_GUESS / s.median
  local price = HARM_OF_BOTH
  for _, role in pairs(roles) do
    if role.gives == 0 or role.takes == 0 then price = HARM end
  end
  local place_s, least_alone, least_first = s.constants.place * prompt / s.median, huge, huge
  for i = 1, count do
    local role, busy = roles[slots[i]], s.busy_share[i]
    if not role or role.alone then least_alone = min(least_alone, busy) end
    if role and role.gives ~= 0 then least_first = min(least_first, busy) end
  end
  least_alone, least_first = least_alone < huge and least_alone * place_s or 0, least_first * place_s
  local base, alone, full, harm, answering = {}, {}, {}, {}, {}
  local first, ready, pinned, givers = {}, {}, {}, {} -- of candidates that may be first in a pair
  local last, lacks, handed, takers = {}, {}, {}, {} -- of candidates that may be partners

  for i = 1, count do
    local row, tps, role, held = s.rows[i], s.speed[i], roles[slots[i]], own[i] or 0
    local decode, n = unpack_from(ROW_DECODE_TOKENS_TO_IN_FLIGHT, row, DECODE_TOKENS_AT)
    local foreign, _, capacity =
      unpack_from(ROW_FOREIGN_DECODE_TOKENS_TO_CAPACITY_BLOCKS, row, FOREIGN_DECODE_TOKENS_AT)
    local context, cache = decode + foreign, FITS * capacity * s.block
    local compute, per_token = (prompt - held) / tps, PER_CONTEXT / tps
    local step, slowed = STEP_TOKENS / tps + per_token * context, 1 - min(s.busy_share[i], MOST_BUSY)
    local over = cache > 0 and context > 0 and max(0, context + prompt + answer - cache) or 0
    base[i], harm[i], full[i] = cost[i], price * n * compute, over > 0 and over / context * answer * step or 0
    answering[i] = ANSWER_PRICE * answer * (step + (n + 1) * per_token * prompt) / slowed
    alone[i] = (not role or role.alone) and base[i] - least_alone + full[i] + harm[i] + answering[i] or huge
    if role and role.gives ~= 0 then
      pinned[i] = cache > 0 and max(0, context + prompt - cache) / tps or 0
      first[i], ready[i] = base[i] - least_first + pinned[i] + (role.alone and harm[i] or 0), s.base_s[i] + compute
      givers[#givers + 1] = i
    end
    if role and role.takes ~= 0 then
      handed[i], lacks[i] = step + answering[i], prompt - held + (tiers and tiers.tokens[i] or 0)
      last[i] = max(guess * lacks[i] + HANDOVER_S, full[i]) + handed[i]
      takers[#takers + 1] = i
    end
  end

  local partners, fields = {}, {} -- by class of the first; links to read
  for _, p in ipairs(cheapest_of(givers, first, slots)) do
    local class = roles[slots[p]].gives
    local those = partners[class]
    if not those then
      those = {}
      for _, d in ipairs(takers) do
        if band(roles[slots[d]].takes, class) ~= 0 then those[#those + 1] = d end
      end
      partners[class] = cheapest_of(those, last, slots)
    end
    for _, d in ipairs(those) do fields[#fields + 1] = string.format("%d:%d", slots[p], slots[d]) end
  end
  if not s.links then
    s.links = {}
    for k, seconds in ipairs(s.links_key and fields[1] and redis.call("HMGET", s.links_key, unpack(fields)) or {}) do
      s.links[fields[k]] = tonumber(seconds or nil)
    end
  end

  -- Return the cost of a pair, and of that the seconds of the transfer and those of the partner's own prefill.
  local function pair_of(p, d)
    local transfer = (s.links[string.format("%d:%d", slots[p], slots[d])] or guess) * lacks[d] + HANDOVER_S
    local left = max(0, s.base_s[d] - ready[p] - transfer)
    return first[p] + max(transfer, full[d]) + handed[d] + left, transfer, left
  end

  local paired, partner, best, best_pair = {}, {}, nil, nil
  for _, p in ipairs(givers) do
    for _, d in ipairs(partners[roles[slots[p]].gives]) do
      local seconds = d ~= p and pair_of(p, d) or huge
      if seconds < (paired[p] or huge) then paired[p], partner[p] = seconds, d end
    end
    if paired[p] and (not best_pair or paired[p] < paired[best_pair]) then best_pair = p end
  end
  for i = 1, count do
    if alone[i] < (best and alone[best] or huge) then best = i end
  end
  for i = 1, not best and not best_pair and count or 0 do -- no engine with the right role is left
    alone[i] = base[i] - least_alone + full[i] + harm[i] + answering[i]
    if not best or alone[i] < alone[best] then best = i end
  end

  if s.terms then
    s.best = {}
    if best then s.best[1] = { best, 0, alone[best], 0, 0, 0, 0 } end
    if best_pair then
      local d = partner[best_pair]
      local seconds, transfer, left = pair_of(best_pair, d)
      s.best[#s.best + 1] = { best_pair, d, seconds, transfer, full[d], handed[d], left }
    end
  end
  s.partner, s.decode_s = partner, {}
  local bar = min(best and alone[best] or huge, best_pair and paired[best_pair] or huge) + equal_s
  local among = best and alone[best] <= bar and {} or nil
  for i = 1, count do
    if among and alone[i] <= bar then among[i] = true end
    if alone[i] <= (paired[i] or huge) + equal_s then partner[i] = nil end
    cost[i] = partner[i] and paired[i] or alone[i]
    s.decode_s[i] = harm[i]
    local terms = s.terms and s.terms[i]
    if terms then
      local less = partner[i] and least_first or least_alone
      terms[BUSY_TERM] = terms[BUSY_TERM] - less
      terms[DECODE_TERM] = partner[i] and first[i] - base[i] + less - pinned[i] or harm[i] + answering[i]
      terms[#terms + 1] = partner[i] and pinned[i] or full[i]
      terms[#terms + 1] = partner[i] and paired[i] - first[i] or 0
    end
  end

  function s.towards(e)
    local seconds, w = alone[e], e
    for _, p in ipairs(givers) do
      if p ~= e and lacks[e] and band(roles[slots[e]].takes, roles[slots[p]].gives) ~= 0 then
        local other = pair_of(p, e)
        if other + equal_s < seconds then seconds, w = other, p end
      end
    end
    partner[w], cost[w] = w ~= e and e or nil, seconds
    return w
  end

  function s.useless(barred)
    local names = { barred ~= "" and barred or nil }
    for i = 1, count do
      if cost[i] == huge then names[#names + 1] = string.sub(s.rows[i], WORKER_ID_AT) end
    end
    return table.concat(names, ",")
  end

  if among then return alone[best], best, among end
  return paired[best_pair], best_pair
end
