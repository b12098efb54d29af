--[[
tick/each_second: the part of tick that looks at every worker, once a second: it updates the flags SERVER, UNHEARD and
ENDS, gives back the load of engines that are dead, finds workers to be forgotten, and computes the fleet's median speed
and capacity.

Guarantee: UNHEARD (a replica called vouch) ends when the worker and its API server were both heard after the last such
call, and at the latest ttl_ms after it, except in grace, when replicas may have been away and could not call. ENDS ends
when no right tally of the engine came for LATE_TALLY_MS: its reports may have stopped. An engine is dead for its load
(tick/dead_engine) ttl_ms and VOUCH_MS after its last heartbeat, at this part's next call, unless replicas vouch for it.

Takes the keys alive, alive_servers, servers, load, next_slot and workers by name, the key prefix, the server's time,
ttl_ms, forget_ms, whether it is a time of grace, tick's answer (forget:<id> is added to it), and stream_of(key) ->
length and last time of a stream.
Returns the median speed (tokens/s; 0: unknown) and the median capacity (blocks; 0: unknown), both of workers whose URL
has answered a probe, so that no other process can influence them; and the load rows (worker id, row, in turn).
--]]
local call = redis.call
local FORGETS_AT_ONCE = 8
local LATE_TALLY_MS = 12500 -- age of the last right tally, of which one comes with each heartbeat: two are missing
local VOUCH_MS = 2000 -- time for a vouch that is on its way; an engine that takes longer to answer counts as dead
local with_flags, heard = include "shared/with_flags", include "shared/heard"

return function(keys, prefix, now, ttl_ms, forget_ms, grace, answer, stream_of)
  local function scores(key)
    local flat, score = call("ZRANGE", key, 0, -1, "WITHSCORES"), {}
    for i = 1, #flat, 2 do score[flat[i]] = tonumber(flat[i + 1]) end
    return score
  end

  -- Tell whether a worker or server was silent for forget_ms and its stream is empty. One that left is silent since its
  -- last entry.
  local function forgettable(stream, seen)
    if seen and seen > now - forget_ms then return false end
    local length, ms = stream_of(prefix .. stream)
    if length ~= 0 then return not length end
    return ms < now - forget_ms or ms > now + forget_ms -- in the future: Redis refuses new entries
  end

  local function still_vouched(worker, core_ms, server_ms)
    local record = call("HGET", keys.workers_key, worker)
    local vouched = record and cjson.decode(record).vouched or 0
    if (core_ms or 0) > vouched and (server_ms or 0) > vouched then return false end
    return grace or vouched >= now - ttl_ms and vouched <= now
  end

  -- Return the time when a replica last checked this approximate worker. Replicas of before 2026-11-23 do not note that
  -- time: then note it here once, or a worker that nobody checks would never be forgotten.
  local function checked(worker)
    local text = call("HGET", keys.workers_key, worker)
    local record = text and cjson.decode(text)
    if record and not record.checked then
      record.checked = now
      call("HSET", keys.workers_key, worker, cjson.encode(record))
    end
    return record and record.checked
  end

  local function reports_ends(worker)
    return grace or (tonumber(call("ZSCORE", prefix .. "running:" .. worker, "") or "") or 0) >= now - LATE_TALLY_MS
  end

  local bury -- a function, only if an engine is dead
  local alive, alive_servers = scores(keys.alive_key), scores(keys.alive_servers_key)
  local rows = call("HGETALL", keys.load_key)
  local speeds, capacities = {}, {} -- of workers whose URL has answered
  local served, forgets = {}, 0 -- API servers that have a worker; number of forget: names so far
  local function forget_if_due(stream, seen, worker)
    if grace or forgets >= FORGETS_AT_ONCE or not forgettable(stream, seen) then return end
    forgets, answer[#answer + 1] = forgets + 1, "forget:" .. worker
  end
  for i = 1, #rows, 2 do
    local worker, row = rows[i], rows[i + 1]
    local flags, _, speed, _, _, _, capacity = struct.unpack(ROW_FLAGS_TO_CAPACITY_BLOCKS, row, FLAGS_AT)
    local answered = bit.band(flags, FLAG_URL) > 0
    if answered and speed > 0 then speeds[#speeds + 1] = speed end
    if bit.band(flags, FLAG_APPROXIMATE) == 0 then
      if answered and capacity > 0 then capacities[#capacities + 1] = capacity end
      local server = worker:match("^(.*)%.%d+$")
      served[server or worker] = true
      local seen = alive_servers[server or worker]
      local unheard, was = bit.band(flags, FLAG_UNHEARD) > 0, flags
      if unheard and not still_vouched(worker, alive[worker], seen) then
        flags, unheard = flags - FLAG_UNHEARD, false
      end
      local up = heard(seen, now, ttl_ms)
      if up ~= (bit.band(flags, FLAG_SERVER) > 0) and (up or not (grace or unheard)) then
        flags = bit.bxor(flags, FLAG_SERVER)
      end
      if bit.band(flags, FLAG_ENDS) > 0 and not reports_ends(worker) then flags = flags - FLAG_ENDS end
      if flags ~= was then
        row = with_flags(row, flags)
        call("HSET", keys.load_key, worker, row)
      end
      if not (grace or unheard or heard(alive[worker], now, ttl_ms + VOUCH_MS)) then
        bury = bury or (include "tick/dead_engine")(keys.load_key, keys.next_slot_key, prefix, now)
        rows[i + 1] = bury(worker, row)
      end
      if not unheard then forget_if_due("events:" .. worker, alive[worker], worker) end
    else -- an approximate worker that failed a check is not in `alive`, but stays while some replica checks it
      forget_if_due("events:" .. worker, alive[worker] or checked(worker), worker)
    end
  end
  for _, server in ipairs(call("HKEYS", keys.servers_key)) do -- servers without workers are named by their rank 0
    if not served[server] then forget_if_due("server:" .. server, alive_servers[server], server .. ".0") end
  end
  table.sort(speeds)
  table.sort(capacities)
  return speeds[math.ceil(#speeds / 2)] or 0, capacities[math.ceil(#capacities / 2)] or 0, rows
end
