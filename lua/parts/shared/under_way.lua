--[[
shared/under_way: the most prompt tokens that may be under way in an engine right after a prefill has ended there.

An engine computes waiting prompts together in one step, and their first tokens come together. So as many tokens may be
under way now as have just ended together, or half of those under way before, if that is more; but no more than are
booked. Earlier ends count as together with this one by a share that falls to 0 within 50 ms, so ends in quick
succession add up. Scripts take these tokens, but no more, for computed as time passes, even if the engine stands still.

Guarantee: pure. Takes the tokens that were under way before, the ms since a prefill last ended or began on the idle
engine (modulo 2^32, as clocks may differ and tell an earlier time), the tokens of the prefill that has ended, and the
booked tokens that are left. Returns the tokens.
--]]
local max, min = math.max, math.min
local STEP_MS = 50 -- longest time between the first tokens of one step

return function(before, passed_ms, ended, left)
  local together = passed_ms < PAST_MS and max(0, 1 - passed_ms / STEP_MS) or 1
  return max(0, min(math.floor(max(ended + before * together, before / 2)), left))
end
