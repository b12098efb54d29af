--[[
decide/cost: the predicted seconds to first token of every candidate, with the prices of the rule, and the lowest.

Guarantee: pure. Takes the state, the useful match by candidate (tokens) and the session's home or nil. Sets s.cost.
Costs within max(1 block, 2 % of the prompt, 5 ms) of the lowest are equal. With an objective only those count that meet
it at the least load, if any does. Returns the candidate and one word why.
--]]
local max = math.max

-- Who meets the objective with no more load than another who does; nil: nobody meets it.
local function enough(s, slack)
  local least, bar
  for i = 1, s.count do
    local base = s.base_s[i]
    if s.cost[i] <= s.objective_s and (not least or base < least) then
      least, bar = base, base + max(slack / s.speed[i], 0.005)
    end
  end
  if not least then return nil end
  local found = {}
  for i = 1, s.count do found[i] = s.cost[i] <= s.objective_s and s.base_s[i] <= bar end
  return found
end

return function(s, own, home)
  local prompt, count, kappa, speed, fill, base_s = s.prompt, s.count, s.kappa, s.speed, s.fill, s.base_s
  local making, lowest, tie, cost, slack = 0, math.huge, 0, s.cost, max(0.02 * prompt, s.block)
  for i in pairs(s.speculated) do making = max(making, own[i]) end
  local mean_fill, price = s.total_fill / count, s.pressure_price * prompt
  local each, waiting, cheapest = s.least_wait > 0 and s.lambda or 1, s.wait_price, nil
  for i = 1, count do
    local tokens, over = prompt - (own[i] or 0), fill[i] - mean_fill
    local again = making - prompt + tokens
    tokens = each * tokens
    if again > 0 then tokens = tokens + kappa * again end
    if over > 0 then tokens = tokens + price * over end
    local seconds = waiting * base_s[i] + tokens / speed[i]
    cost[i] = seconds
    if seconds < lowest then lowest, tie, cheapest = seconds, max(slack / speed[i], 0.005), i end
  end
  local among = s.objective_s > 0 and enough(s, slack) or nil
  local why = among and not among[cheapest] and "objective" or nil
  if why then
    lowest = math.huge
    for i = 1, count do
      if among[i] and cost[i] < lowest then lowest, tie = cost[i], max(slack / speed[i], 0.005) end
    end
  end
  return (include "decide/tie")(s, lowest + tie, among, home, why)
end
