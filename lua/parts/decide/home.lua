--[[
decide/home: the first of `order` (ids joined by commas: where a hash ring would look) that is a candidate and passes.

Guarantee: pure. Takes the state and a test of a candidate (nil: all pass). Returns the candidate or nil.
--]]
return function(s, passes)
  local place = {}
  for i = 1, s.order == "" and 0 or s.count do place[string.sub(s.rows[i], 59)] = i end
  for worker in s.order:gmatch("[^,]+") do
    local i = place[worker]
    if i and (not passes or passes(i)) then return i end
  end
end
