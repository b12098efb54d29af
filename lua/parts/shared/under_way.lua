--[[
shared/under_way: for how many prompt tokens an engine may be computing the prefill after some prefill has ended.

An engine computes all prompts that wait in one step, and their first tokens come together. So as much may be under way
now as has ended together, or half of what was under way before, but no more than is left. What ended before counts as
together by a share that falls to nothing in 50 ms, so ends that follow each other faster than that add up. It is a
bound: an engine that stands still looks lighter by no more than that.

Guarantee: pure. Takes the tokens that were under way before, the ms since a prefill ended last or began on an idle
engine (modulo 2^32: clocks that differ may tell a time before), the tokens of the prefill that has ended, and those of
all that is left. Returns the tokens.
--]]
local max, min = math.max, math.min
local STEP_MS = 50 -- longest time between the first tokens of one step

return function(before, passed_ms, ended, left)
  local together = passed_ms < PAST_MS and max(0, 1 - passed_ms / STEP_MS) or 1
  return max(0, min(math.floor(max(ended + before * together, before / 2)), left))
end
