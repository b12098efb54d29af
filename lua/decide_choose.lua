--[[
decide_choose: which candidate a request goes to. replay.lua runs this very text on the states of a decision log.

Guarantee: pure: the same state gives the same choice. Takes the state (decide_rows, decide_match: rows, wait, base_s,
speed, fill, count, least_wait, total_fill, matched, speculated, slack) and in it the request: policy, prompt, seed,
lambda, kappa, pressure_price, turn (decisions of round_robin so far).
Returns the candidate and one word why: lowest (its cost or load), pressure, flight, seed (what decided among equals),
turn. Sets s.cost: predicted seconds to first token by candidate, with the prices of the rule.
--]]
local unpack_from, sub, max, min = struct.unpack, string.sub, math.max, math.min

local function before(p, q)
  for k = 1, 4 do
    if p[k] ~= q[k] then return p[k] < q[k] end
  end
end

return function(s)
  local prompt, count, kappa, wait, speed = s.prompt, s.count, s.kappa, s.wait, s.speed
  local fill, base_s, matched, slack, seed = s.fill, s.base_s, s.matched, s.slack, s.seed
  local making, lowest, tie, winner, first, cost, rows = 0, math.huge, 0, nil, nil, {}, s.rows
  for i in pairs(s.speculated) do making = max(making, matched[i]) end
  local mean_fill, price = s.total_fill / count, s.pressure_price * prompt
  local each = s.least_wait > 0 and s.lambda or 1
  for i = 1, count do
    local own, over = matched[i] or 0, fill[i] - mean_fill
    local tokens = each * (prompt - own)
    if own < making then tokens = tokens + kappa * (making - own) end
    if over > 0 then tokens = tokens + price * over end
    local seconds = base_s[i] + tokens / speed[i]
    cost[i] = seconds
    if seconds < lowest then lowest, tie = seconds, max(slack / speed[i], 0.005) end
  end
  s.cost = cost
  if s.policy == "round_robin" then
    local turn = {}
    for i = 1, count do turn[i] = i end
    table.sort(turn, function(p, q) return sub(rows[p], 51) < sub(rows[q], 51) end)
    return turn[s.turn % count + 1], "turn"
  end
  local rank, bar = cost, lowest + tie
  if s.policy == "least_loaded" then rank, bar = wait, min(unpack(wait)) end
  for i = 1, count do
    if rank[i] <= bar then
      local flight, slot = unpack_from(">i4I4", rows[i], 13)
      -- The seed and the slot, mixed by a square: a linear mix would let some slots win more often.
      local mix = (seed * 40503 + slot * 2654435769) % 4294967291 % 67108859
      local key = { 0, 0, flight, mix * mix % 4294967291 }
      if rank == cost then key[1], key[2] = (unpack_from(">I4", rows[i], 47)), fill[i] end
      if not first or before(key, first) then winner, first = i, key end
    end
  end
  return winner, "lowest"
end
