--[[
decide/wait_turn: whether a request must wait its turn. If it must, it has a ticket in the queue when this returns, or
an answer that says why it has none.

decide calls it while tickets wait or no candidate has room. Guarantee: while tickets wait, no request goes before one
whose turn it is; while none waits, only a saturated fleet makes a request wait.
Takes the candidates of this request (shared/candidates); a function that gives the candidates of any request; the keys
of queue and leases; the reservation's id; the time in us; the constants of the replica; and the request: priority,
tenant, tokens, barred (ids of workers that cannot serve it, joined by commas), waited_ms, queue_max (tickets that the
queue may have when this one enters; 0: this request gets no ticket and takes nobody's place), prefix of the keys,
per_minute (tokens, if its client has such a limit).
Returns the answer {QUEUED, FULL or DISPLACED, tickets, ms of work in them}; or nil, and a function to call when the
request is booked, with the tokens of work that it makes.
--]]
local call, capacity_of, fair_queue = redis.call, include "shared/capacity", include "shared/fair_queue"
local MAX_TURNS, MAX_REAPED, MAX_BARRED_BYTES = 256, 8, 8192

return function(s, everybody, queue_key, leases_key, id, now_us, constants, request)
  local limit_s, block_sizes = constants.max_engine_wait_s, constants.block_sizes
  local queue, speed = fair_queue(queue_key, now_us, constants.ticket_ms, request.prefix), 0
  local flow = queue.flow(request.priority, request.tenant)
  local function answer(word)
    for i = 1, s.count do speed = speed + s.speed[i] end
    return { word, queue.waiting(), math.ceil(queue.tokens() * 1000 / speed) }
  end
  call("ZREM", leases_key, id) -- the first write frees memory: a full Redis then allows the writes after it
  queue.reap(MAX_REAPED)
  local ticket = queue.find(id)
  if ticket == queue.DISPLACED then
    queue.leave(id)
    return answer("DISPLACED")
  elseif ticket then
    queue.renew(id)
  else
    local most = request.queue_max
    if queue.waiting() >= most and (most == 0 or not queue.displace(flow)) then return answer("FULL") end
    local barred = #request.barred <= MAX_BARRED_BYTES and request.barred or ""
    queue.enter(id, flow, request.tokens, barred, request.waited_ms, request.per_minute)
  end
  if not capacity_of(s, limit_s, block_sizes, true) then return answer("QUEUED") end
  local capacity = capacity_of(everybody(), limit_s, block_sizes)
  if not queue.turns(capacity, MAX_TURNS)[id] then return answer("QUEUED") end
  return nil, function(work) queue.leave(id, math.max(work, 1)) end
end
