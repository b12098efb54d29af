--[[
shared/heard: tells whether a worker or an API server is alive.

Guarantee: pure. `shared/alive_workers` applies the same rule as a range of scores, and `heard` in
app/warmfleet/fleet/worker/state.py in Python.
Takes the score in `alive` or `alive_servers` (ms of the last heartbeat; nil: it left, or was never heard), the time in
ms, and ttl_ms. Returns whether a heartbeat came within ttl_ms.
--]]
return function(score, now, ttl_ms) return (tonumber(score or "") or -1) >= now - ttl_ms end
