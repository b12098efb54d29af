--[[
decide/with_room: of the candidates with room the choice, or else the cheapest. Policies that do not choose by cost keep
their choice if any candidate has room.

Guarantee: pure. Takes the state after the choice (decide/cost_rule), the choice, and by candidate the seconds of room.
Returns a candidate, nil if none has room.
--]]

return function(s, w, room)
  local best
  for i = 1, s.count do
    if room[i] > NO_ROOM_S and (i == w or best ~= w and (not best or s.cost[i] < s.cost[best])) then best = i end
  end
  return best and s.policy ~= "cost" and w or best
end
