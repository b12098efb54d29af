--[[
settle/session: notes in the ledger of sessions that a request of a session has ended.

A session whose answer ended otherwise than in tool calls gives up its place, unless no answer of it ever ended in tool
calls and its requests follow its answers soon.
Takes the key prefix, the time in ms, the session's id, finish (t tool calls, e the session has ended, o otherwise,
? unknown) and the tokens of the whole context (0: unknown).
Keys: sessions, places
--]]
local bor, band = bit.bor, bit.band

return function(prefix, now, sid, finish, tokens)
  local ledger = (include "shared/sessions")(prefix)
  local r = ledger.read(sid)
  if not r then return end
  local state = ledger.state()
  r.running = math.max(0, r.running - 1)
  if r.running == 0 then r.booked = 0 end
  if tokens > 0 then r.tokens = tokens end
  if finish == "e" and r.running == 0 then
    ledger.leaves(r)
    return ledger.drop(sid)
  end
  if r.heard == 0 then r.since = now end -- a held session waits since another time
  if finish ~= "?" then
    r.traits = bor(r.traits, TRAIT_STEPPED)
    if finish == "t" then
      r.traits = bor(r.traits, TRAIT_CALLED, TRAIT_USES_TOOLS)
    else
      r.traits = r.traits - band(r.traits, TRAIT_CALLED)
    end
    if finish == "t" or r.kind == KIND_TOOLS then ledger.judge(r, state, finish == "t") end
    local waits = finish == "t" or band(r.traits, TRAIT_USES_TOOLS) == 0 and ledger.is_agent(r, state)
    if r.place == PLACE_IN and r.running == 0 and not waits then ledger.leaves(r) end
  end
  ledger.write(sid, r)
end
