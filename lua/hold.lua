--[[
hold: tells the held sessions of one replica how they stand in the line, and keeps them in it.

Guarantee: a held session that no replica names for 5 s leaves the line (tick/sessions). `tick` lets sessions in.

ARGV: prefix, leaving (number of the first ids whose last held request leaves), then ids of sessions (<= 512)
Returns: {number of sessions in the line, then for each id that does not leave: its Standing (0 WAITS, 1 TURN: it has a
      place, 3 UNKNOWN), number of sessions before it, ms until its turn as predicted}
Cost: O(ids * log line)
Keys that depend on data: sessions, places
--]]
local session_line_key, tick_key = unpack(KEYS)
local prefix, leaving = ARGV[1], tonumber(ARGV[2])
local FIRST_SESSION, MOST_SESSIONS = 3, 512
local call = redis.call

if not leaving or #ARGV > FIRST_SESSION - 1 + MOST_SESSIONS then
  return redis.error_reply("BAD_ARGUMENT hold: how many leave, and at most 512 ids")
end
local time = call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ledger = (include "shared/sessions")(prefix)
call("ZREM", session_line_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
for i = FIRST_SESSION, FIRST_SESSION - 1 + leaving do
  local r = ledger.read(ARGV[i])
  if r and r.heard > 0 then
    r.heard = 0
    if r.place ~= PLACE_IN or r.running == 0 then r.place = PLACE_OUT end
    ledger.write(ARGV[i], r)
  end
  call("ZREM", session_line_key, ARGV[i])
end
-- Without the last number of `tick` the ledger does not bind, and nobody lets the sessions in.
local binds = (call("GET", tick_key) or ""):find("^%d+ %d+ %d+ %d+ %d+ %d+ %d+$")
local state, answer = ledger.state(), { call("ZCARD", session_line_key) }
for i = FIRST_SESSION + leaving, #ARGV do
  local r, ahead, standing = ledger.read(ARGV[i]), call("ZRANK", session_line_key, ARGV[i]), STANDING_WAITS
  if not r or not binds then
    standing = STANDING_UNKNOWN
  elseif r.place == PLACE_IN then
    standing = STANDING_TURN
  elseif not ahead then
    standing = STANDING_UNKNOWN
  end
  if r and standing ~= STANDING_UNKNOWN then
    r.heard = now
    ledger.write(ARGV[i], r)
  end
  answer[#answer + 1] = standing
  answer[#answer + 1] = ahead or 0
  answer[#answer + 1] = ledger.wait_ms(state, ahead or 0)
end
return answer
