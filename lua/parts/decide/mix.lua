--[[
decide/mix: a hash of the seed and a candidate's slot, which decides where nothing else does.

Guarantee: pure. Mixed by a square: a linear mix would let some slots win more often. Takes the state and the candidate.
--]]
return function(s, i)
  local one = (s.seed * 40503 + struct.unpack(">I4", s.rows[i], 17) * 2654435769) % 4294967291 % 67108859
  return one * one % 4294967291
end
