--[[
shared/busy_share: the share of time that a worker spends in prefill, as a mean in which older time counts less.

A session comes back to its worker, so recent work predicts future work. A row stores the share as it was at since_ms,
when a prefill last began on the idle worker, or ended. A script that changes since_ms updates the share.
A mean over 60 s follows too slowly: the mean TTFT of agents is then 1.2 times that of sticky sessions; with 15 s not.

Guarantee: pure. Takes the share in the row (0 to 65535), whether a prefill was booked since since_ms, since_ms (0: no
prefill yet), and the time in ms (clocks may differ: a time before since_ms changes nothing).
Returns the share at that time, and the same as an integer for the row, rounded up or down depending on the clock,
because prefills of a few ms would never change it if always rounded down.
--]]
local exp, floor = math.exp, math.floor
local GOLDEN = 0.6180339887498949 -- multiples of it, modulo 1, are spread evenly

return function(share, busy, since, ms)
  local passed = (ms - since) % U32
  if since > 0 and passed < PAST_MS then
    local kept = exp(-passed / BUSY_MEMORY_MS)
    share = share * kept + (busy and BUSY_ALWAYS * (1 - kept) or 0)
  end
  return share, floor(share + ms * GOLDEN % 1)
end
