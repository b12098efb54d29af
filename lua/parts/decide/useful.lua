--[[
decide/useful: what of each match the choice counts; no more than prefix_tokens, and what others lack from min_match on.

Guarantee: pure. Takes the state. Returns tokens by candidate.
--]]
return function(s)
  if s.prefix_tokens <= 0 and s.min_match <= 0 then return s.matched end
  local own, common, most = {}, math.huge, s.prefix_tokens > 0 and s.prefix_tokens or math.huge
  for i = 1, s.count do
    own[i] = math.min(s.matched[i] or 0, most)
    common = math.min(common, own[i])
  end
  for i = 1, s.count do own[i] = own[i] - common < s.min_match and common or own[i] end
  return own
end
