--[[
settle/session: notes in the ledger of sessions that a request of a session has ended.

A session whose answer ended otherwise than in tool calls gives up its place, unless its requests came back soon before.
Takes the key prefix, the time in ms, the session's id, finish (t tool calls, e the session has ended, o otherwise,
? unknown) and the tokens of the whole context (0: unknown).
Keys: sessions, places
--]]
local bor, band = bit.bor, bit.band

return function(prefix, now, sid, finish, tokens)
  local ledger = (include "shared/sessions")(prefix, now)
  local r = ledger.read(sid)
  if not r then return end
  local state = ledger.state()
  r.running = math.max(0, r.running - 1)
  if r.running == 0 then r.booked = 0 end
  if tokens > 0 then r.tokens = tokens end
  if finish == "e" and r.running == 0 then
    ledger.leaves(r, state)
    return ledger.drop(sid)
  end
  if r.heard == 0 then r.since = now end -- a held session waits since another time
  if finish ~= "?" then
    r.traits = bor(r.traits, TRAIT_STEPPED)
    r.traits = finish == "t" and bor(r.traits, TRAIT_CALLED) or r.traits - band(r.traits, TRAIT_CALLED)
    if finish == "t" or r.kind == KIND_TOOLS then ledger.judge(r, state, finish == "t") end
    if r.place == PLACE_IN and r.running == 0 and not ledger.is_agent(r, state) then ledger.leaves(r, state) end
  end
  ledger.write(sid, r)
end
