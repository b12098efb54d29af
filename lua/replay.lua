--[[
replay: what decide would choose on a state of a decision log, and why.

Guarantee: pure: touches no key and no clock; the text that chooses is decide's own. Runs by EVAL_RO.

KEYS: -
ARGV: policy, prompt_tokens, seed, lambda, kappa, pressure_price, decode_s_per_token, wait_price, prefix_tokens,
      min_match_tokens, order (ids joined by commas), objective_s, median speed (tokens/s), block_tokens, turn, now_ms,
      then per candidate: load row, matched_tokens, speculative_tokens
Returns: {worker_id, why, cost_s, matched_tokens}
Cost: O(candidates)
--]]
local rows_of, choose, FIRST = include "shared/candidates", include "decide/cost_rule", 17
local rows, matched, speculated = {}, {}, {}
for k = FIRST, #ARGV, 3 do
  local i, making = #rows + 1, tonumber(ARGV[k + 2])
  rows[i], matched[i], speculated[i] = ARGV[k], tonumber(ARGV[k + 1]), making > 0 and making or nil
end
local s = rows_of(rows, nil, tonumber(ARGV[13]), tonumber(ARGV[7]), tonumber(ARGV[16]))
if s.count == 0 or s.count < #rows then
  return redis.error_reply("BAD_ARGUMENT replay: rows of candidates that decide would not have had")
end
s.policy, s.prompt, s.seed, s.lambda = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
s.kappa, s.pressure_price, s.wait_price = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[8])
s.prefix_tokens = tonumber(ARGV[9])
s.min_match, s.order, s.objective_s = tonumber(ARGV[10]), ARGV[11], tonumber(ARGV[12])
s.block, s.turn, s.matched, s.speculated = tonumber(ARGV[14]), tonumber(ARGV[15]), matched, speculated
local w, why = choose(s)
return { string.sub(s.rows[w], 59), why, string.format("%.6f", s.cost[w]), matched[w] }
