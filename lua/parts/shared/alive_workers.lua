--[[
shared/alive_workers: reads every load row, and finds which workers are alive.

Guarantee: no worker counts as expired in a time of grace: until the time that `tick` has set, and while no replica has
ticked for over 2.5 s, because heartbeats then wait unread.
Takes the keys of alive, load and tick, the time in ms, ttl_ms, and ids to leave out (joined by commas).
Returns all rows; the ids that are alive (id -> true, or false if the id is to be left out; nil: all are alive and none
is left out); the fleet's median speed (tokens/s); and, while the ledger of sessions binds, the tokens below which a
prompt without name and tools is none of a session (else nil).
--]]
local call = redis.call

return function(alive_key, load_key, tick_key, now, ttl_ms, exclude)
  local ticked, grace_until, median, least =
    string.match(call("GET", tick_key) or "", "^(%d+) (%d+) (%d+) ?%d* ?%d* ?%d* ?(%d*)")
  local grace = not ticked or now - ticked > GRACE_AFTER_MS or now - ticked < 0 or now - grace_until < 0
  local all, since, alive = call("HVALS", load_key), grace and "-inf" or string.format("%d", now - ttl_ms), nil
  -- Count the living workers first: to read their ids takes twice as long as to read all rows.
  if exclude ~= "" or call("ZCOUNT", alive_key, since, "+inf") < #all then
    alive = {}
    for _, worker in ipairs(call("ZRANGEBYSCORE", alive_key, since, "+inf")) do alive[worker] = true end
    for worker in exclude:gmatch("[^,]+") do alive[worker] = false end
  end
  median = tonumber(median) or 0
  return all, alive, median == 0 and UNKNOWN_SPEED or median, tonumber(least)
end
