--[[
decide/cost_rule: which candidate a request goes to, by ten policies; lua/README.md names their sources. What replays a
decision log runs this very text on the states in it.

Guarantee: pure: the same state gives the same choice. Takes the state of shared/candidates and decide/prefix_match
(rows, wait,
base_s, speed, fill, count, least_wait, total_fill, matched, speculated, block) and in it the request: policy, prompt,
seed, lambda, kappa, pressure_price, prefix_tokens, min_match, order, objective_s, turn (decisions of round_robin).
Returns the candidate and one word why: lowest (cost or load), home, pressure, flight, seed (what decided among equals),
objective, match, smallest, imbalance, bound, turn. Sets s.cost: predicted seconds to first token, with the prices.
--]]
-- Functions are made where they are needed: 20 of them for each decision would cost more than choosing.
local cost = include "decide/cost"

return function(s)
  local hinted = s.prefix_tokens > 0 or s.min_match > 0
  local own = hinted and (include "decide/useful")(s) or s.matched
  local home = s.order ~= "" and (include "decide/home")(s) or nil
  local winner, why = cost(s, own, home)
  if s.policy ~= "cost" then return (include "decide/baseline_policies")(s) end
  return winner, why
end
