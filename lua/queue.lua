--[[
queue: renews the tickets of one replica's waiting requests, deletes those of requests that leave, and tells which
tickets may be served now (have their turn).

Guarantee: creates no ticket. Which tickets have their turn follows from the queue and the time, whichever replica asks,
as long as all replicas have the same block sizes and weights (shared/tickets, limit_s, and shared/turns). Deletes
expired tickets, also those of replicas that died.

ARGV: prefix, constants (packed, see shared/constants), leaving (number of the first ids whose requests leave), then
      ids (<= 512)
Returns: {number of tickets in the queue,
      ms that the fleet needs to compute what it does not hold of their prompts,
      ms until an engine that is full has room if it goes on at its speed (-1: not predictable),
      ids of all tickets that have their turn,
      the first ticket; {} if ids are given or none waits; else {id, prompt tokens, size in us, ms waited, number of
        waiting flows, the worker that it gets or waits for, whether that worker can take it now (0/1), whether any
        worker that may serve it has room (0/1), us that the former worker needs for what it lacks of the prompt},
      then for each id that does not leave: 0 WAITS, 1 TURN, 2 DISPLACED (another took its place), 3 UNKNOWN}
Cost: O(workers + (ids + looked) * log tickets + looked * log workers), and O(workers) for each set of barred workers;
      looked: tickets looked at, at most 256; 64 are reaped at most. 1.6 ms with 64 workers, 2.5 ms with 256
      (`bench decide --queue`)
Keys that depend on data: client:<tag>, tokens:<tag>
--]]
local alive_key, load_key, tick_key, queue2_key = unpack(KEYS)
local prefix, constants, leaving = ARGV[1], ARGV[2], tonumber(ARGV[3])
local FIRST_ID, MAX_IDS, TICKETS_REAPED = 4, 512, 64
local call = redis.call

if not leaving or #ARGV > FIRST_ID - 1 + MAX_IDS then
  return redis.error_reply("BAD_ARGUMENT queue: the constants, how many leave, and at most 512 ids")
end
local replica, refusal = (include "shared/constants")(constants)
if not replica then return refusal end
local alive_workers, candidates = include "shared/alive_workers", include "shared/candidates"
local tickets, turns, room = include "shared/tickets", include "shared/turns", include "shared/room"

local time = call("TIME")
local now, now_us = time[1] * 1000 + math.floor(time[2] / 1000), time[1] * 1000000 + time[2]
local queue = tickets(queue2_key, now_us, replica.ticket_ms, prefix)
call("ZREM", queue2_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
queue.begin_anew_if_a_part_is_lost()
for i = FIRST_ID, FIRST_ID - 1 + leaving do queue.leave(ARGV[i]) end
queue.reap(TICKETS_REAPED)

-- Return the ticket that is first in order, in the form of the answer.
local function first_of(left)
  local id, ticket = queue.first()
  if not ticket or #ticket < TICKET_OWN_AT - 1 then return {} end
  local tokens, size_us = struct.unpack(TICKET_SIZE, ticket)
  local waited_ms = math.floor(now_us / 1000 - ticket:sub(TICKET_ARRIVAL_AT, TICKET_PLACE_AT - 1) / 1000)
  local worker, is_turn, any_room, own_us = left.stands(ticket)
  return { id, tokens, size_us, waited_ms, queue.flows(), worker, is_turn and 1 or 0, any_room and 1 or 0, own_us }
end

local waiting = queue.waiting()
local all, alive, median = alive_workers(alive_key, load_key, tick_key, now, replica.ttl_ms, "")
local s = candidates(all, alive, median, replica, 1, now, 1, false, true)
local is_turn, ids = {}, {} -- of tickets whose turn it is: id -> worker, and the list of ids
local first, due_s = {}, math.huge
if waiting > 0 and s.count > 0 then
  local room_of, overdue_s = room(s, queue.limit_s(replica.max_engine_wait_s), replica.block_sizes)
  local left = turns.room_left(s, room_of, overdue_s)
  if #ARGV < FIRST_ID then first = first_of(left) end
  is_turn = turns.take(queue, left, MAX_TURNS)
  for i = 1, s.count do
    local room_s, room_in_s = room_of(i)
    if room_s <= 0 and room_in_s < due_s then due_s = room_in_s end
  end
end

for id in pairs(is_turn) do ids[#ids + 1] = id end
local answer = { waiting, s.count > 0 and math.ceil(queue.work_us() / 1000 / s.count) or 0,
  due_s < math.huge and math.ceil(due_s * 1000) or -1, ids, first }
for i = FIRST_ID + leaving, #ARGV do
  local id, standing = ARGV[i], STANDING_WAITS
  local ticket = queue.find(id)
  if not ticket then
    standing = STANDING_UNKNOWN
  elseif ticket == queue.DISPLACED then
    standing = STANDING_DISPLACED
    queue.leave(id)
  else
    queue.renew(id)
    if is_turn[id] then standing = STANDING_TURN end
  end
  answer[#answer + 1] = standing
end
return answer
