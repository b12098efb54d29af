--[[
decide/tie: of the candidates that cost the same the session's home, then the least evicting, the least filled, the
least in flight, a hash of the seed.

Guarantee: pure. Takes the state, the highest cost that counts as the same, who may win (nil: all), the home or nil, and
a word if what made them few decides. Returns the candidate and that word, or the last of these that was needed.
--]]
local WORDS = { "home", "pressure", "pressure", "flight", "seed" }

return function(s, bar, among, home, why)
  local cost, rows, fill, unpack_from = s.cost, s.rows, s.fill, struct.unpack
  local winner, evicted, flight, mixed, level, mix = nil, nil, nil, nil, 0, nil
  for i = 1, s.count do
    if cost[i] <= bar and (not among or among[i]) then
      local e, f, m, place, lower = (unpack_from(">I4", rows[i], 47)), nil, nil, 0, true
      if winner and (i == home or winner == home) then
        place, lower = 1, i == home
      elseif winner and e ~= evicted then
        place, lower = 2, e < evicted
      elseif winner and fill[i] ~= fill[winner] then
        place, lower = 3, fill[i] < fill[winner]
      elseif winner then
        flight = flight or unpack_from(">i4", rows[winner], 13)
        f = unpack_from(">i4", rows[i], 13)
        if f ~= flight then
          place, lower = 4, f < flight
        else
          mix = mix or include "decide/mix"
          mixed = mixed or mix(s, winner)
          m = mix(s, i)
          place, lower = 5, m < mixed
        end
      end
      if lower then
        winner, evicted, flight, mixed, level = i, e, f, m, place
      elseif place > level then
        level = place
      end
    end
  end
  return winner, why or WORDS[level] or "lowest"
end
