--[[
queue: the tickets of one replica live on, and whose turn it is.

Guarantee: renews what is there and makes nothing; what leaves is gone in the same step. Whose turn it is follows from
the queue alone, whoever asks. Reaps expired tickets, those of replicas that died among them.

KEYS: alive load tick queue
ARGV: ttl_ms, ticket_ms, max_engine_wait_s, block_sizes (scheme=tokens joined by commas), leaving (count of the first
      ids, which give up their tickets), then ids (<= 512)
Returns: {tickets in the queue, tokens of their prompts, ms in which the fleet computes these, then for each id that
      stays: 0 it waits, 1 it is its turn, 2 another took its place, 3 unknown}
Cost: O(workers + ids * log tickets + turns); at most 64 tickets reaped, 256 looked at
--]]
local alive_key, load_key, tick_key, queue_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local ttl_ms, ticket_ms, limit_s = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local block_sizes, leaving = ARGV[4], tonumber(ARGV[5])
local MAX_IDS, MAX_TURNS, MAX_REAPED, FIRST = 512, 256, 64, 6
local WAITS, TURN, DISPLACED, UNKNOWN = 0, 1, 2, 3
local call = redis.call

if not (ttl_ms and ticket_ms and limit_s and leaving) or #ARGV > FIRST - 1 + MAX_IDS then
  return redis.error_reply("BAD_ARGUMENT queue: four numbers, block sizes and at most 512 ids")
end
local alive_rows, rows_of = include "shared/alive_workers", include "shared/candidates"
local room_of, line_of = include "shared/capacity", include "shared/fair_queue"

local time = call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local line = line_of(queue_key, time[1] * 1000000 + time[2], ticket_ms)
call("ZREM", queue_key, "") -- after a write that takes no memory, a full Redis allows the others
for i = FIRST, FIRST - 1 + leaving do line.leave(ARGV[i]) end
line.reap(MAX_REAPED)

local waiting = line.waiting()
local all, alive, median = alive_rows(alive_key, load_key, tick_key, now, ttl_ms, "")
local s, speed, turns = rows_of(all, alive, median, 0, now), 0, {}
for i = 1, s.count do speed = speed + s.speed[i] end
if waiting > 0 then turns = line.turns(room_of(s, limit_s, block_sizes), MAX_TURNS) end

local answer = { waiting, line.tokens(), speed > 0 and math.ceil(line.tokens() * 1000 / speed) or 0 }
for i = FIRST + leaving, #ARGV do
  local id, state = ARGV[i], WAITS
  local record = line.find(id)
  if not record then
    state = UNKNOWN
  elseif record == "" then
    state = DISPLACED
    line.leave(id)
  else
    line.renew(id)
    if turns[id] then state = TURN end
  end
  answer[#answer + 1] = state
end
return answer
