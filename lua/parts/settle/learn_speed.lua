--[[
settle/learn_speed: learns a worker's prefill speed from the times of first tokens. Only workers that do not report
their speed need it, such as engines without the plugin.

When a prefill ends, the row says since when it was under way: since its booking on an idle worker, or since the end of
the prefill before it. The speed is a mean over WINDOW_S of prefill time, so that prompts that were computed together,
whose first tokens come together, count as one.

Guarantee: pure. Takes the row as it was before the prefill was given back, the tokens of the prefill, and the server's
time in ms. Returns the speed in tokens/s; 0 while it is not known.
--]]
local WINDOW_S, LONGEST_S, LEAST_S = 5, 60, 0.01
local LEAST_TOKENS, MAX_SPEED = 64, 4000000000

return function(row, tokens, now)
  local speed = struct.unpack(ROW_SPEED_TPS, row, SPEED_TPS_AT)
  local seconds = (now - struct.unpack(ROW_SINCE_MS, row, SINCE_MS_AT)) % U32 / 1000
  -- The time of a short prefill is mostly overhead. A very long time shows that the clock stepped back.
  if tokens < LEAST_TOKENS or seconds > LONGEST_S then return speed end
  if speed == 0 then
    if seconds < LEAST_S then return 0 end
    speed = tokens / seconds
  else
    speed = speed + (tokens - speed * seconds) / (WINDOW_S + seconds)
  end
  return math.floor(math.max(1, math.min(speed, MAX_SPEED)))
end
