--[[
decide/wait_turn: whether a request must wait its turn. If it must, it has a ticket in the queue when this returns.

Guarantee: while tickets wait nobody goes before whose turn it is; without any, only saturation makes a request wait
(decide asks for both first and calls this for nobody else). Takes the candidates (shared/candidates) of this request
and
those of everybody (a function), the keys of queue and leases, the reservation's id, the time in us, and the request:
priority, tenant, tokens, barred (ids that cannot serve it, joined by commas), waited_ms, queue_max, limit_s,
block_sizes, ticket_ms. Returns an answer, or nothing and a function for when it is booked: it takes the work in tokens.
--]]
local call, room_of, line_of = redis.call, include "shared/capacity", include "shared/fair_queue"
local MAX_TURNS, MAX_REAPED, MAX_BARRED = 256, 8, 8192

return function(s, everybody, queue_key, leases_key, id, now_us, request)
  local limit_s, block_sizes = request.limit_s, request.block_sizes
  local line, speed = line_of(queue_key, now_us, request.ticket_ms), 0
  local flow = line.flow(request.priority, request.tenant)
  local function told(word)
    for i = 1, s.count do speed = speed + s.speed[i] end
    return { word, line.waiting(), math.ceil(line.tokens() * 1000 / speed) }
  end
  call("ZREM", leases_key, id) -- the first write frees memory: then a full Redis takes the rest too
  line.reap(MAX_REAPED)
  local record = line.find(id)
  if record == "" then
    line.leave(id)
    return told("DISPLACED")
  elseif record then
    line.renew(id)
  else
    local most = request.queue_max -- 0: it may not wait, so it takes nobody's place either
    if line.waiting() >= most and (most == 0 or not line.displace(flow)) then return told("FULL") end
    local barred = #request.barred <= MAX_BARRED and request.barred or ""
    line.enter(id, flow, request.tokens, barred, request.waited_ms)
  end
  if not room_of(s, limit_s, block_sizes, true) then return told("QUEUED") end
  if not line.turns(room_of(everybody(), limit_s, block_sizes), MAX_TURNS)[id] then return told("QUEUED") end
  return nil, function(work) line.leave(id, math.max(work, 1)) end
end
