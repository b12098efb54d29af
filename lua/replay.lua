--[[
replay: tells which worker decide would choose in a state that a decision log recorded, and why.

Guarantee: pure: touches no key and no clock. Runs decide's own code for the choice (decide/cost_rule), by EVAL_RO.

ARGV: constants (packed: shared/constants; of them the weights count), policy, prompt_tokens, seed, prefix_tokens, order
      (ids joined by commas), objective_s, median_tps (speed, tokens/s), block_tokens, turn, now_ms, room (numbers of
      the candidates that had room, joined by commas; empty: the choice did not depend on room),
      then per candidate: load row, matched_tokens, speculative_tokens, tokens to be loaded from tiers, seconds of that
Returns: {worker_id, why, cost_s, matched_tokens}
Cost: O(candidates)
--]]
local constants, policy, prompt_tokens, seed = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local prefix_tokens, order, objective_s = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local median_tps, block_tokens, turn = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local now_ms, room = tonumber(ARGV[11]), ARGV[12]
local FIRST_CANDIDATE = 13
local replica, refusal = (include "shared/constants")(constants)
if not replica then return refusal end
local candidates = include "shared/candidates"
local choose, with_room = include "decide/cost_rule"

local rows, matched, speculated, loads, loading = {}, {}, {}, {}, {}
for k = FIRST_CANDIDATE, #ARGV, 5 do
  local i, speculative = #rows + 1, tonumber(ARGV[k + 2])
  rows[i], matched[i], speculated[i] = ARGV[k], tonumber(ARGV[k + 1]), speculative > 0 and speculative or nil
  local tokens = tonumber(ARGV[k + 3])
  if tokens > 0 then loads[i], loading[i] = tokens, tonumber(ARGV[k + 4]) end
end
local s = candidates(rows, nil, median_tps, replica, prompt_tokens, now_ms, block_tokens, false, true)
if s.count == 0 or s.count < #rows then
  return redis.error_reply("BAD_ARGUMENT replay: rows of candidates that decide would not have had")
end
s.policy, s.seed, s.prefix_tokens, s.order, s.objective_s = policy, seed, prefix_tokens, order, objective_s
s.block, s.turn = block_tokens, turn
s.matched, s.speculated = matched, speculated
if next(loads) then s.tiers = { tokens = loads, seconds = loading } end
local w, why = choose(s)
if room ~= "" then
  local of = {}
  for i = 1, s.count do of[i] = ("," .. room .. ","):find("," .. i .. ",", 1, true) and 1 or 0 end
  local chosen = with_room(s, w, of)
  if chosen ~= w then w, why = chosen or w, "room" end
end
return { string.sub(s.rows[w], WORKER_ID_AT), why, string.format("%.6f", s.cost[w]), matched[w] }
