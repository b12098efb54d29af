--[[
shared/busy_share: the share of time that a worker spends in prefill, as a mean in which older time counts less.

A session that is placed comes back, so the work of late tells the work to come. A row keeps the share of the moment
since_ms. Whoever changes since_ms (a prefill begins on an idle worker, or one ends) brings the share up to date.
A mean over 60 s in place of 15 follows too slowly: policies that stick to sessions are then 20 % better.

Guarantee: pure. Takes the share as the row has it (0 to 65535), whether a prefill was booked since then, since_ms (0:
there was no prefill yet), and the time in ms. Clocks that differ may tell a time before since_ms: it changes nothing.
Returns the share at that time, and the same as a number for the row: rounded by the clock, up or down, because
prefills of few ms would else change nothing.
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
