--[[
shared/alive_workers: every load row, and who of them is alive; nobody expires while the applier itself has been away.

Takes the keys of alive, load and tick, the time in ms, ttl_ms and ids that are left out (joined by commas). Returns all
rows, the ids of the living (nil: all of them) and the fleet's median speed (tokens/s).
--]]
local call, GRACE_GAP_MS = redis.call, 1000

return function(alive_key, load_key, tick_key, now, ttl_ms, exclude)
  local ticked, grace_until, median = string.match(call("GET", tick_key) or "", "^(%d+) (%d+) (%d+)")
  local grace = not ticked or now - ticked > GRACE_GAP_MS or now - ticked < 0 or now - grace_until < 0
  local all, since, alive = call("HVALS", load_key), grace and "-inf" or now - ttl_ms, nil
  if exclude ~= "" or call("ZCOUNT", alive_key, since, "+inf") < #all then -- reading all rows is half of by name
    alive = {}
    for _, worker in ipairs(call("ZRANGEBYSCORE", alive_key, since, "+inf")) do alive[worker] = true end
    for worker in exclude:gmatch("[^,]+") do alive[worker] = nil end
  end
  median = tonumber(median) or 0
  return all, alive, median == 0 and 10000 or median
end
