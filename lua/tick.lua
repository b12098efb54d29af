--[[
tick: the fleet's periodic work: tells which streams have a backlog and which workers to forget, commands snapshots, and
decides whether Redis is short of memory.

Guarantee: does its work at most once per min_gap_ms for the whole fleet, by the server's clock, however many replicas
call it. If the last tick is over 2.5 s old or in the future, a time of grace of ttl_ms begins: Redis or all routers
were away, so heartbeats wait unread. In grace no server expires and no worker is forgotten. Grace also lasts while
Redis is full, because no worker can write heartbeats then. At most two workers send a snapshot (all their blocks) at a
time, none while memory is short; the command for a snapshot is repeated after 30 s without progress.
Pace: a tick grants its caller Redis time for apply: share_permille of the time since the last tick (at most 200 ms of
it count), twice that while over RUSH_ENTRIES entries wait. All replicas together get no more.

ARGV: prefix, min_gap_ms, ttl_ms, forget_ms, max_streams, used_permille (of maxmemory; -1: unknown), short_ms,
      share_permille, constants (packed, see shared/constants)
Returns: {1 if this call did the work else 0, grace 0/1, number of retired slots, memory short 0/1, granted us, then
      names: events:<id> or server:<id> (a stream with a backlog), snapshot:<id> (the events stream of a worker that
      sends a snapshot, to be applied after the others), forget:<id> (a worker to be forgotten)}
Cost: O(max_streams), <= 150 us idle; once a second O(workers + sessions)
Keys that depend on data: events:<worker_id>, server:<server_id>, command:<worker_id>, yields:<worker_id>,
      running:<worker_id>, sessions, session_line, places
--]]
local tick_key, hello_key, cursor_key, alive_key, alive_servers_key, servers_key, load_key, resync_key, retired_key,
  counts_key, workers_key, ejections_key, next_slot_key = unpack(KEYS)
local prefix, min_gap_ms, ttl_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local forget_ms, max_streams, used_permille = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local short_ms, share_permille, constants = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]
local SHORT_FROM, SHORT_TO = 850, 750 -- permille of maxmemory: short from SHORT_FROM on, until below SHORT_TO
local LEAST_MS, KEPT_MS, RUSH_ENTRIES = 16, 200, 4096 -- ms since a tick that a grant counts: least, most; see Pace
local SHADOWS_AT_ONCE, REISSUE_MS = 2, 30000
local HELLOS, HELLOS_KEPT = 256, 4096 -- most hints that a tick reads (0.3 ms), and that `hello` keeps
local GRANTED_US = 5 -- the position of granted us in the answer

local call = redis.call
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local before = call("GET", tick_key) or ""
local last, grace_until, median, start, short, room, bound =
  before:match("^(%d+) (%d+) (%d+) ?(%d*) ?(%d*) ?(%d*) ?(%d*)")
bound = tonumber(bound) -- if the ledger of sessions binds: tokens of the least prompt that it looks at
last, grace_until, median = tonumber(last), tonumber(grace_until) or 0, tonumber(median) or 0
start, room = tonumber(start) or 0, tonumber(room) or 0 -- room: median size of the engines' caches, in blocks
short = tonumber(short) or 0 -- the time since which memory is short (ms; 0: it is not)
local skip = last and last <= now and now - last < min_gap_ms
if skip then return { 0, grace_until > now and 1 or 0, 0, short > 0 and 1 or 0, 0 } end
local full = (redis.pcall("SET", tick_key, before).err or ""):find("OOM", 1, true)
call("ZREM", resync_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
if full or not last or last > now or now - last > GRACE_AFTER_MS then grace_until = now + ttl_ms end
if last and last > now then -- the clock has stepped back: times in the future become now
  for _, key in ipairs({ alive_key, alive_servers_key, resync_key }) do
    for _, name in ipairs(call("ZRANGEBYSCORE", key, "(" .. now, "+inf")) do call("ZADD", key, "XX", now, name) end
  end
  short = math.min(short, now)
end
if full or used_permille >= SHORT_FROM then
  short = short > 0 and short or now
elseif used_permille < SHORT_TO and now - short >= short_ms then
  short = 0
end
local grace = grace_until > now
local answer = { 1, grace and 1 or 0, call("SCARD", retired_key), short > 0 and 1 or 0, 0 }
answer[GRANTED_US] = share_permille * math.max(LEAST_MS, math.min(KEPT_MS, last and now - last or KEPT_MS))

-- Return the length of a stream and the time of its last id; nil if the key holds no stream.
local function stream_of(key)
  local info, field = redis.pcall("XINFO", "STREAM", key), {}
  if info.err then return end
  for i = 1, #info, 2 do field[info[i]] = info[i + 1] end
  return field.length, tonumber(field["last-generated-id"]:match("^%d+"))
end

-- Adds a stream to `cursor`, if it exists.
local function notice(stream)
  if call("TYPE", prefix .. stream).ok == "none" then return end -- a key of a wrong type is apply_control's to delete
  local length, ms = stream_of(prefix .. stream)
  if length == 0 and ms > now + FAR_FUTURE_MS then -- the stream takes no entry any more, and has none to apply
    call("HINCRBY", counts_key, "hostile", 1)
    call("UNLINK", prefix .. stream)
  else
    call("HSETNX", cursor_key, stream, "0-0")
  end
end

-- Adds the streams that `hello` names, if they exist. Any worker may write to `hello` as often as it likes, so only the
-- youngest hints are kept, and each name is looked up once. A hint at a core's stream is also one at its server's.
local function greet()
  local kind = call("TYPE", hello_key).ok
  if kind == "none" then return end
  if kind ~= "stream" then return call("UNLINK", hello_key) end
  call("XTRIM", hello_key, "MAXLEN", HELLOS_KEPT)
  local page, looked_at = call("XRANGE", hello_key, "-", "+", "COUNT", HELLOS), {}
  if not page[1] then
    local _, said = stream_of(hello_key)
    if said > now + FAR_FUTURE_MS then call("UNLINK", hello_key) end -- `hello` would take no entry any more
    return
  end
  for _, item in ipairs(page) do
    local field, stream = item[2][1], item[2][2]
    local name = field == "s" and (stream:match("^events:(.+)$") or stream:match("^server:(.+)$"))
    if not name or #name > 64 or not name:match("^[%w._-]+$") then
      call("HINCRBY", counts_key, "malformed", 1)
    elseif not looked_at[stream] then
      local server = stream:match("^events:(.+)%.%d+$")
      looked_at[stream] = true
      notice(stream)
      if server then notice("server:" .. server) end
    end
  end
  local ms, sequence = page[#page][1]:match("^(%d+)-(%d+)$")
  if tonumber(sequence) < LAST_SEQUENCE then
    call("XTRIM", hello_key, "MINID", string.format("%s-%.0f", ms, sequence + 1))
  else
    call("UNLINK", hello_key) -- sequence + 1 would be inexact in Lua, so XTRIM cannot name it: all hints are deleted
  end
end

-- Applied entries are trimmed, so a stream that is not empty has a backlog. The next tick starts where this one ends.
local function backlogs()
  local streams, filling, entries = call("HKEYS", cursor_key), {}, 0
  local n = math.min(#streams, max_streams)
  for _, worker in ipairs(call("ZRANGEBYSCORE", resync_key, "(0", "+inf", "LIMIT", 0, max_streams)) do
    filling["events:" .. worker] = "snapshot:" .. worker
  end
  for i = 1, n do
    local stream = streams[(start + i - 1) % #streams + 1]
    local length = redis.pcall("XLEN", prefix .. stream) -- a key of a wrong type fails here; apply_control deletes it
    if type(length) ~= "number" or length > 0 then answer[#answer + 1] = filling[stream] or stream end
    entries = entries + (tonumber(length) or 0)
  end
  if entries > RUSH_ENTRIES then answer[GRANTED_US] = 2 * answer[GRANTED_US] end
  start = n > 0 and (start + n) % #streams or 0
end

-- Command snapshots. Scores of resync: -ms: time since which a worker waits; +ms: time when its snapshot was commanded
-- or last made progress. Of the workers that are alive, the one that has waited longest is next.
local function command_resyncs()
  local heard = include "shared/heard"
  local filling, waiting = 0, {}
  for _, worker in ipairs(call("ZREVRANGEBYSCORE", resync_key, "+inf", "-inf", "LIMIT", 0, max_streams)) do
    local since = tonumber(call("ZSCORE", resync_key, worker))
    local alive = heard(call("ZSCORE", alive_key, worker), now, ttl_ms)
    if since > 0 and alive and now - since < REISSUE_MS then
      filling = filling + 1
    elseif alive then
      waiting[#waiting + 1] = worker
    elseif not grace then
      call("ZREM", resync_key, worker) -- a dead worker would keep others waiting; if it returns, its digest asks anew
    end
  end
  for i = 1, math.min(#waiting, SHADOWS_AT_ONCE - filling) do
    local key = prefix .. "command:" .. waiting[i]
    local command = cjson.decode(call("GET", key) or "{}")
    if command["do"] ~= "rejoin" then
      command.id, command["do"] = redis.sha1hex(waiting[i] .. clock[1] .. clock[2]):sub(1, 8), "resync"
      call("SET", key, cjson.encode(command))
    end
    call("ZADD", resync_key, now, waiting[i])
  end
end

greet()
backlogs()
if short == 0 and call("ZCARD", resync_key) > 0 then command_resyncs() end
if not last or math.floor(last / 1000) ~= math.floor(now / 1000) then
  local once_a_second = include "tick/each_second"
  local keys = { alive_key = alive_key, alive_servers_key = alive_servers_key, servers_key = servers_key,
    load_key = load_key, workers_key = workers_key, ejections_key = ejections_key, next_slot_key = next_slot_key }
  local rows
  median, room, rows = once_a_second(keys, prefix, now, ttl_ms, forget_ms, grace, answer, stream_of)
  local replica = (include "shared/constants")(constants)
  local keeps = replica and replica.held_max_ms > 0 and short == 0
  if keeps then
    bound = (include "tick/sessions")(prefix, now, replica, rows, bound)
  else -- nobody is held without a ledger, whose keys stay after a tick of a version that has none
    call("UNLINK", prefix .. "sessions", prefix .. "session_line", prefix .. "places")
    bound = nil
  end
  local trials = include "tick/trials"
  trials(keys, now, ttl_ms, grace)
end
local state = string.format("%.0f %.0f %.0f %.0f %.0f %.0f", now, grace_until, median, start, short, room)
call("SET", tick_key, bound and state .. string.format(" %.0f", bound) or state)
return answer
