--[[
decide/dump_state: all that a choice saw, for who asked to be told.

Guarantee: pure. Takes the state, the answer that it goes behind, the candidate that was chosen and its match as the
choice saw it. Returns the answer: {median speed, block_tokens, turn, time in ms modulo 2^32, would it wait for its turn
first (asked dry)}, then {worker_id, matched_tokens, speculative_tokens, load row, cost_s} of each candidate.
--]]
return function(s, answer, w, saw)
  local format = string.format
  answer[#answer + 1] =
    { format("%d", s.median), format("%d", s.block), format("%d", s.turn), format("%d", s.now % 2 ^ 32),
      s.waits and "1" or "0" }
  for i = 1, s.count do
    local row, making, made = s.rows[i], s.speculated[i], 0
    if making then made = math.min(making * ARGV[s.chain_of[struct.unpack(">I4", row, 23)] + 1], s.prompt) end
    local match = i == w and saw or s.matched[i] or 0
    answer[#answer + 1] = { row:sub(59), match, made, row, format("%.6f", s.cost[i]) }
  end
  return answer
end
