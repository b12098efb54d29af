--[[
decide/believed_speeds: bounds the speed of engines that compute no prompts for others by that of those which do.

A speed is measured on what an engine computes. Long prompts are computed more slowly, token by token, and the engines
that compute for others get them; so the others seem faster than they would be with such a prompt, and would get it.

Guarantee: pure. Takes the state of shared/candidates and the roles (shared/constants). Lowers s.speed.
--]]
return function(s, roles)
  local fastest = 0
  for i = 1, s.count do
    local role = roles[s.slots[i]]
    if role and role.gives ~= 0 then fastest = math.max(fastest, s.speed[i]) end
  end
  for i = 1, fastest > 0 and s.count or 0 do
    local role = roles[s.slots[i]]
    if role and role.gives == 0 then s.speed[i] = math.min(s.speed[i], fastest) end
  end
end
