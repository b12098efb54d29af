--[[
decide/cost_rule: chooses the candidate for a request. This file is the policy `cost`; all others are in
decide/baseline_policies.

`cost` takes the candidate with the lowest predicted seconds to first token:
  (wait_price * wait + lambda * uncached + kappa * again + (stay - 1) * lost
    + pressure_price * (overfill * uncached + crowd * prompt)) / speed
    + decoding * (slows - least slows) + min(loading + max(0, loading - line), lambda * loads / speed)
    + place * busy_share * prompt / median speed + wait_price * decode_s_per_token * decode tokens + label_price
  wait      prefill tokens that are ahead on this worker, less those computed by now of the prefill under way
  uncached  tokens of the prompt that this worker must compute
  lambda    the weight of an uncached token; 1 while some worker has nothing to do
  again     tokens of the prompt that another worker is computing now and this worker would compute once more
  lost      tokens of the prompt that only one worker holds, and not this one: a session that moves leaves them behind.
            So a system prompt that two workers hold costs nothing
  overfill  fill of the worker's cache less the mean fill: the fuller the cache, the more each computed token evicts
  crowd     caches that the contexts booked there would need beyond the worker's own (n=20 samples soon do)
  slows     (decode_price * decodes * uncached + context_price * (context + decodes * prompt)) / speed, for the requests
            in flight (decodes) and the tokens of their contexts. A step of an engine computes part of a prompt, and a
            token of each answer: computing delays all answers, and steps are longer the more context they have. A
            worker whose cost is otherwise above the lowest by more than computing the whole prompt takes counts as the
            one that slows most: no request goes there for the sake of answers, so an engine that joins does not draw
            all requests. The least is that of the other workers
  decoding  how much answers count: the share of their time in which engines compute no prompts, since lines grow if
            busy engines' prompts are placed for the sake of answers; times the share of FILLED of the caches that
            contexts need, since they make steps long. 0 while a worker is computing half of the prompt or more: all
            engines would compute the common beginning of a burst
  busy_share  share of its time that the worker spent in prefill lately. A session comes back to its worker, so future
            work counts, and recent work predicts it. As a share of time, it costs fast and slow workers alike
  loads     tokens of the prompt that only a tier of the worker holds (decide/tiers); `loading` is the time to load
            them. It is charged twice, because a prompt's beginning that is only in a tier has left the GPU before, and
            will again; but a load costs no more than computing. A session also stays for what a tier holds
  line      seconds of all prefills booked there: the engine loads while it computes them, so what of a load fits into
            them is charged once
  label_price  seconds that the replica's operator set for labels which the worker lacks (WARMFLEET_PREFER); 0 if no
            label is preferred, or if the worker joined after the replica last read the workers' records
Costs within max(1 block, 2 % of the prompt, 5 ms) of the lowest count as equal. Among equals the session's home wins
(the first worker of `order` that is a candidate), then the worker that holds more of the prompt, in steps of 2 % of it:
with smaller steps, all prompts with the same short beginning would go to one worker. Then a worker whose blocks may be
matched, the least evicting, the least filled, the one with fewest requests in flight, and at last a hash of the seed.
In a fleet whose engines have roles, decide/joint prices answers and room in its own way if the request may be split;
then objective_s does not count.
With objective_s, the choice is among the least loaded of the candidates whose cost without slows meets that objective:
a bigger match is no reason to join a longer line if the objective is met without it.

Guarantee: pure: the same state gives the same choice. lua/replay.lua runs this code on the states of a decision log.
The state: from shared/candidates (rows, slots, unmatchable, load_s, speed, fill, crowd, cost, count, least_wait,
total_fill, delays, total_busy, total_filled; base_s and busy_share, for terms and objective_s only), from
decide/prefix_match (matched, speculated, block; and tokens and seconds of tiers, if there are any), and the request:
policy, prompt, seed, prefix_tokens, order, objective_s, constants (shared/constants), turn (decisions that round_robin
has made).
Returns two functions: choose(state), and with_room (below).
choose returns the candidate and one word for what decided: lowest (cost or load), home, prefix, pressure, flight, seed
or objective; with other policies also match, smallest, imbalance, bound or turn. With every policy it sets
  s.cost   predicted seconds to first token, by candidate
  s.decode_s  the term of slows, by candidate; nil if it is 0 for all
  s.partner  if s.roles is set: by candidate the one that takes over from it (decide/joint, which sets more)
  s.tie_s  seconds above the lowest cost within which a cost counts as equal to it
  s.terms  if it is a table: by candidate the terms of the cost, in seconds with their weights: wait, uncached, again,
           lost, overfill and crowd, busy_share, label_price, decodes and context, loads; if s.roles is set, two
           more: for room in caches, and for the partner
--]]
local max, min, huge, floor, unpack_from, sub = math.max, math.min, math.huge, math.floor, struct.unpack, string.sub
local FILLED = 0.5 -- share of caches from which on contexts count as filling them (decoding)
local EQUAL_SHARE, EQUAL_S = 0.02, 0.005 -- largest difference that counts as equal: share of prompt, seconds
local DECIDED_BY = { "home", "prefix", "pressure", "pressure", "flight", "seed" } -- the steps of a tie, in order

-- Return the tokens of each match that count, by candidate: at most prefix_tokens; and tokens beyond the shortest match
-- of all only if they are min_match_tokens or more.
local function useful_matches(s)
  local prefix_tokens, min_match = s.prefix_tokens, s.constants.min_match_tokens
  if prefix_tokens <= 0 and min_match <= 0 then return s.matched end
  local own, common, most = {}, huge, prefix_tokens > 0 and prefix_tokens or huge
  for i = 1, s.count do
    own[i] = min(s.matched[i] or 0, most)
    common = min(common, own[i])
  end
  for i = 1, s.count do own[i] = own[i] - common < min_match and common or own[i] end
  return own
end

-- Return the first worker of `order` that is a candidate and passes the test (nil: all pass); nil if none is.
local function first_in_order(s, passes)
  local place = {}
  for i = 1, s.order == "" and 0 or s.count do place[sub(s.rows[i], WORKER_ID_AT)] = i end
  for worker in s.order:gmatch("[^,]+") do
    local i = place[worker]
    if i and (not passes or passes(i)) then return i end
  end
end

-- Hash the seed and the candidate's slot, with a square, because with a linear hash some slots would win more often.
local function draw(s, i)
  local mixed = (s.seed * 40503 + unpack_from(ROW_SLOT, s.rows[i], SLOT_AT) * 2654435769) % 4294967291 % 67108859
  return mixed * mixed % 4294967291
end

-- Return, as a set, the least loaded of the candidates that meet the objective; nil if none meets it.
local function meeting_objective(s, slack)
  local least, bar
  for i = 1, s.count do
    local base = s.base_s[i]
    if s.cost[i] <= s.objective_s and (not least or base < least) then
      least, bar = base, base + max(slack / s.speed[i], EQUAL_S)
    end
  end
  if not least then return nil end
  local found = {}
  for i = 1, s.count do found[i] = s.cost[i] <= s.objective_s and s.base_s[i] <= bar end
  return found
end

-- Of the candidates that cost at most `bar` and are in `among` (nil: all are) return the winner of the tie and the last
-- of the steps (DECIDED_BY) that was needed to find it. Fields of a row are read only for the steps that need them.
-- own: useful tokens of each match; nil if no match is long enough to decide.
local function win_tie(s, bar, among, home, own)
  local cost, rows, fill, unmatchable, share = s.cost, s.rows, s.fill, s.unmatchable, EQUAL_SHARE * s.prompt
  local winner, held, evicted, flight, drawn -- the candidate that leads so far, and its values
  local level = 0
  for i = 1, s.count do
    if cost[i] <= bar and (not among or among[i]) then
      local e = unmatchable[i] and huge or unpack_from(ROW_EVICTED, rows[i], EVICTED_AT)
      local h = own and floor((own[i] or 0) / share) or 0
      local f, d
      local step, lower = 0, true -- the step by which candidate and winner differ; whether the candidate leads
      if winner and (i == home or winner == home) then
        step, lower = 1, i == home
      elseif winner and h ~= held then
        step, lower = 2, h > held
      elseif winner and e ~= evicted then
        step, lower = 3, e < evicted
      elseif winner and fill[i] ~= fill[winner] then
        step, lower = 4, fill[i] < fill[winner]
      elseif winner then
        flight = flight or unpack_from(ROW_IN_FLIGHT, rows[winner], IN_FLIGHT_AT)
        f = unpack_from(ROW_IN_FLIGHT, rows[i], IN_FLIGHT_AT)
        if f ~= flight then
          step, lower = 5, f < flight
        else
          drawn, d = drawn or draw(s, winner), draw(s, i)
          step, lower = 6, d < drawn
        end
      end
      if lower then
        winner, held, evicted, flight, drawn, level = i, h, e, f, d, step
      elseif step > level then
        level = step
      end
    end
  end
  return winner, DECIDED_BY[level] or "lowest"
end

-- Add the term of slows to the costs. Sets s.decode_s, and the term in s.terms. own: useful tokens of each match.
-- making: tokens of the prompt that some worker is computing now. lowest, cheapest: the lowest cost without this term,
-- and its candidate. Returns both with the term.
local function add_decode_terms(s, own, making, lowest, cheapest)
  local prompt, count, cost, delays, terms = s.prompt, s.count, s.cost, s.delays, s.terms
  local decoding = (1 - s.total_busy / count) * min(1, s.total_filled / count / FILLED)
  s.decode_s = nil -- a choice that is made again may have another match
  if decoding <= 0 or 2 * making >= prompt then return lowest, cheapest end
  local decodes, speed, price = s.decodes, s.speed, s.constants.decode_price
  local bar = lowest + prompt / s.median -- highest cost that may be worth it
  local slows, least, most = {}, huge, 0
  for i = 1, count do
    local held, delay = own[i], delays[i]
    delay = decoding * (held and delay - price * held * decodes[i] / speed[i] or delay)
    slows[i] = delay
    if delay < least and cost[i] <= bar then least = delay end
    if delay > most then most = delay end
  end
  lowest = huge
  for i = 1, count do
    local seconds = cost[i]
    local delay = (seconds <= bar and slows[i] or most) - least
    seconds = seconds + delay
    slows[i], cost[i] = delay, seconds
    if seconds < lowest then lowest, cheapest = seconds, i end
    if terms then terms[i][DECODE_TERM] = delay end
  end
  s.decode_s = slows
  return lowest, cheapest
end

-- Return load_s (shared/candidates) with the price of loads. own: useful tokens of each match.
local function with_loads(s, own, lambda)
  local tiers, found = s.tiers, {}
  for i = 1, s.count do
    local tokens, seconds = tiers.tokens[i], s.load_s[i]
    if tokens then
      local useful = max(0, own[i] - (s.matched[i] - tokens)) -- of the tokens to load
      local loading = tiers.seconds[i] * useful / tokens
      seconds = seconds + min(loading + max(0, loading - s.wait[i] / s.speed[i]), lambda * useful / s.speed[i])
    end
    found[i] = seconds
  end
  return found
end

-- own: useful tokens of each match. home: the session's home (first candidate of `order`) or nil.
local function lowest_cost(s, own, home)
  local constants, prompt, count = s.constants, s.prompt, s.count
  local speed, fill, crowd, load_s, cost, terms = s.speed, s.fill, s.crowd, s.load_s, s.cost, s.terms
  local kappa, pressure, stay = constants.kappa, constants.pressure_price, constants.stay - 1
  local label_prices = constants.label_prices
  local lambda = s.least_wait > 0 and constants.lambda or 1
  if s.tiers then load_s = with_loads(s, own, lambda) end
  local mean_fill = s.total_fill / count
  local slack = max(EQUAL_SHARE * prompt, s.block) -- most tokens by which candidates differ and count as equal
  local making = 0 -- tokens of the prompt that some worker is computing now
  for i in pairs(s.speculated) do -- what its tier holds besides is not computed
    making = max(making, own[i] - (s.tiers and s.tiers.tokens[i] or 0))
  end
  local most, second = 0, 0 -- tokens of the longest match, and of the next
  for _, tokens in pairs(own) do
    if tokens > most then
      most, second = tokens, most
    elseif tokens > second then
      second = tokens
    end
  end
  local leaves = stay * (most - second)
  local lowest, cheapest = huge, nil -- lowest cost, its candidate
  local making_again = making > 0 and kappa * making or 0
  local full_work = lambda * prompt + making_again + leaves -- of a candidate that holds nothing, tokens by weights
  for i = 1, count do
    local held, overfill, tps = own[i], fill[i] - mean_fill, speed[i]
    local work, uncached = full_work, prompt
    if held then
      uncached = prompt - held
      work = lambda * uncached + (making > held and kappa * (making - held) or 0) + (held > second and 0 or leaves)
    end
    local evicts = overfill > 0 and pressure * overfill * uncached or 0
    if crowd and crowd[i] then evicts = evicts + pressure * crowd[i] * prompt end
    local seconds = load_s[i] + (work + evicts) / tps
    if label_prices then seconds = seconds + (label_prices[s.slots[i]] or 0) end
    if terms then
      local again, lost = max(0, making - (held or 0)), held and held > second and 0 or leaves
      terms[i] = { constants.wait_price * s.base_s[i], lambda * uncached / tps, kappa * again / tps, lost / tps,
        evicts / tps, constants.place * prompt / s.median * s.busy_share[i],
        label_prices and label_prices[s.slots[i]] or 0, 0, load_s[i] - s.load_s[i] }
    end
    cost[i] = seconds
    if seconds < lowest then lowest, cheapest = seconds, i end
  end
  local among
  if s.roles then
    lowest, cheapest, among = (include "decide/joint")(s, own, max(slack / s.median, EQUAL_S))
    s.tie_s = max(slack / speed[cheapest], EQUAL_S)
    return win_tie(s, lowest + s.tie_s, among, home, most >= EQUAL_SHARE * prompt and own or nil)
  end
  among = s.objective_s > 0 and meeting_objective(s, slack) or nil
  if s.delays and s.policy == "cost" then lowest, cheapest = add_decode_terms(s, own, making, lowest, cheapest) end
  local objective_decides = among and not among[cheapest]
  if objective_decides then
    lowest = huge
    for i = 1, count do
      if among[i] and cost[i] < lowest then lowest, cheapest = cost[i], i end
    end
  end
  s.tie_s = max(slack / speed[cheapest], EQUAL_S)
  local winner, why = win_tie(s, lowest + s.tie_s, among, home, most >= EQUAL_SHARE * prompt and own or nil)
  return winner, objective_decides and "objective" or why
end

local function choose(s)
  local own = useful_matches(s)
  local winner, why = lowest_cost(s, own, s.order ~= "" and first_in_order(s) or nil)
  if s.policy ~= "cost" then return (include "decide/baseline_policies")(s, own, first_in_order, draw) end
  return winner, why
end

-- Return the choice if it has room, else the cheapest candidate with room; nil if none has. With a policy other than
-- `cost` the choice stays if any candidate has room. room: seconds of room, by candidate.
local function with_room(s, w, room)
  local best
  for i = 1, s.count do
    local cost, free = s.cost[i], room[i] > NO_ROOM_S and s.cost[i] < huge
    if free and (i == w or best ~= w and (not best or cost < s.cost[best])) then best = i end
  end
  if best and s.policy ~= "cost" then return w end
  return best
end

return choose, with_room
