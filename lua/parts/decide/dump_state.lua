--[[
decide/dump_state: adds to an answer all that the choice saw: for /explain, and for the decision log to be replayed.

Guarantee: pure. Takes the state, the answer, the candidate that was chosen, and its match as the choice saw it (a
verification may have shortened it afterwards). Returns the answer with, at its end,
{median speed (tokens/s), block_tokens, turn (decisions that round_robin has made), time in ms modulo 2^32,
 1 if the request must wait for its turn, else 0, seconds by which costs may differ and count as equal,
 numbers of the candidates with room, joined by commas (if wait_turn looked for room that waiting requests leave
 over; the place alone if that decided),
 price of the turn in seconds and number of its candidate (decide/wait_turn; both 0 for a request that need not wait),
 the answer HELD if the session would be held (decide/session), else {},
 the best way of each kind (`best` of decide/joint: numbers of both candidates, then seconds, with blanks between), if
 the request may be split},
then for each candidate {worker_id, matched_tokens, speculative_tokens, load row, cost_s, the terms of the cost in
seconds, joined by commas (decide/cost_rule), tokens of the match to be loaded from tiers, seconds that this
takes, number of the kind of tier}.
--]]
return function(s, answer, chosen, match_seen)
  local format, with_room, best = string.format, {}, {}
  for k, way in ipairs(s.best or {}) do best[k] = format("%d %d %.6f %.6f %.6f %.6f %.6f", unpack(way)) end
  for i = 1, s.room and s.count or 0 do
    if s.room[i] > NO_ROOM_S then with_room[#with_room + 1] = format("%d", i) end
  end
  answer[#answer + 1] =
    { format("%d", s.median), format("%d", s.block), format("%d", s.turn), format("%d", s.now % U32),
      s.waits and "1" or "0", format("%.6f", s.tie_s), table.concat(with_room, ","),
      s.turn_s or "0", format("%d", s.waits and s.turn_at or 0), s.held or {}, best }
  for i = 1, s.count do
    local row, blocks, tokens = s.rows[i], s.speculated[i], 0
    if blocks then
      local chain = s.chain_of[struct.unpack(ROW_SCHEME, row, SCHEME_AT)]
      tokens = math.min(blocks * ARGV[chain + 1], s.prompt)
    end
    local match = i == chosen and match_seen or s.matched[i] or 0
    local tiers = s.tiers
    local loads, loading = tiers and tiers.tokens[i], tiers and tiers.seconds[i]
    local seen = i == chosen and tiers and tiers.seen
    if seen and seen.candidate == i then loads, loading = seen.tokens, seen.seconds end
    local terms = s.terms[i]
    for term, seconds in ipairs(terms) do terms[term] = format("%.6f", seconds) end
    answer[#answer + 1] = { row:sub(WORKER_ID_AT), match, tokens, row, format("%.6f", s.cost[i]),
      table.concat(terms, ","), loads or 0, loads and format("%.6f", loading) or 0,
      loads and tiers.kind[i] or 0 }
  end
  return answer
end
