--[[
settle: notes the first token or the end of a reservation, and takes its load off the worker's row.

Guarantee: subtracts exactly the load that the lease still has, once; a repeated call changes nothing. If the engine
has reported the end before (apply/reservations), the lease has no load any more, and settle does all the rest. Nothing
is subtracted from a worker that has joined anew (another epoch). If an id was never booked and its outcome is failed,
cancelled or unsent, a tombstone is left, so that a decide that arrives later books nothing. After `finished`, the
blocks that the request computed and the engine has not yet reported count as held by the worker for linger_ms: the
report is on its way. An approximate worker reports nothing: Redis guesses its cache (settle/mirror). First tokens
tell the speed of a worker that does not report it (not `due` ones, which follow from that speed). A call for an
unknown id also reaps a few expired leases: a fleet at rest has no decide that does so. If a request of a client with
limits failed or was never sent, and client_tokens is empty, the client gets back the tokens of the prompt.

ARGV: prefix, id, outcome (started; due: as started, but estimated by a replica's clock, as nobody reports this first
      token; finished; failed; cancelled; unsent: the engine never got the request, as another pool was cheaper),
      tombstone_ms, linger_ms, then
      client_tokens: for a client with limits, tokens to count besides those of the prompt (the answer's; below 0:
        tokens to give back; empty: not known)
      held_blocks, age_ms: for an approximate worker, the blocks of the prompt that it had when the request came, if
        fewer than the decision predicted, and the longest time for which the request may have been there
      session, finish, context_tokens: for a request of a session in the ledger, settle/session describes them
      to_slot, moved_tokens, moved_s: with `finished` of a prefill leg, the slot of the engine that took the blocks, the
        tokens that it lacked, and the seconds from the end of the prefill to its first token
Returns: {STARTED, SETTLED, UNKNOWN (never booked, or ended long ago) or SAME (nothing is changed)}; after SETTLED the
      cached tokens of the prompt, if the engine reported them and they were compared with the predicted match
Cost: O(log leases + checkpoints); for an unknown id at most 8 leases reaped
Keys that depend on data: x:<hash>, b:<hash>, lru:<slot>, c:<slot>:<id>, client:<tag>, tokens:<tag>, sessions, places,
      running:<worker_id>, links
--]]
local load_key, leases_key, lease_key = unpack(KEYS)
local prefix, id, outcome = ARGV[1], ARGV[2], ARGV[3]
local tombstone_ms, linger_ms = tonumber(ARGV[4]), tonumber(ARGV[5])

local CLIENT_TOKENS, HELD_BLOCKS, AGE_MS, SESSION_ID, FINISH, CONTEXT_TOKENS = 6, 7, 8, 9, 10, 11
local TO_SLOT, MOVED_TOKENS, MOVED_S = 12, 13, 14
local call = redis.call

if id == "" or not tombstone_ms or not linger_ms then
  return redis.error_reply("BAD_ARGUMENT settle needs an id, tombstone_ms and linger_ms")
end
local starts, unserved = outcome == "started" or outcome == "due", outcome == "failed" or outcome == "unsent"
if not (starts or unserved or outcome == "finished" or outcome == "cancelled") then
  return redis.error_reply("BAD_ARGUMENT unknown outcome " .. outcome)
end
local time = call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local release = (include "shared/release_lease")(load_key, leases_key, lease_key, prefix, now)

local lease = call("HGET", lease_key, id)
if not lease then
  call("ZREM", leases_key, id) -- first write, which frees memory: a full Redis then allows other writes
  release.reap(call("ZRANGEBYSCORE", leases_key, "-inf", now, "LIMIT", 0, MAX_REAPED))
  if not starts and outcome ~= "finished" then
    call("ZADD", leases_key, now + tombstone_ms, id)
    call("HSET", lease_key, id, struct.pack(LEASE, 0, 0, 0, 0, 0, 0, STAGE_TOMBSTONE, 0))
  end
  return { "UNKNOWN" }
end

local epoch, slot, prefill, decode, matched, prompt, stage, length, at = struct.unpack(LEASE, lease)
local ended = stage == STAGE_ENDED -- its engine has told its end, so its load was given back
if stage > STAGE_STARTED and not ended or (stage ~= STAGE_BOOKED and starts) then return { "SAME" } end
call("HDEL", lease_key, id)
-- Replace the bytes of the worker's row from one position up to another.
local function change(worker, from, bytes, to)
  local row = call("HGET", load_key, worker)
  call("HSET", load_key, worker, row:sub(1, from - 1) .. bytes .. row:sub(to))
end

local worker, row = lease:sub(at, at + length - 1), nil
if starts then
  local _, row_slot, before = release.add(worker, epoch, -prefill, 0, 0)
  local flags, scheme, speed = 0, 0, 1
  if row_slot == slot and outcome ~= "due" then
    flags, scheme, speed = struct.unpack(ROW_FLAGS_TO_SPEED_TPS, before, FLAGS_AT)
  end
  if speed == 0 or bit.band(flags, FLAG_APPROXIMATE + FLAG_LEARNED) > 0 then
    speed = (include "settle/learn_speed")(before, prefill, now)
    -- The speed of an approximate worker is always learned, so its row needs no flag LEARNED.
    if speed > 0 and bit.band(flags, FLAG_APPROXIMATE) == 0 then flags = bit.bor(flags, FLAG_LEARNED) end
    local packed = struct.pack(ROW_FLAGS_TO_SPEED_TPS, flags, scheme, speed)
    change(worker, FLAGS_AT, packed, AFTER_SPEED_TPS)
  end
else
  row = release.load(lease, outcome == "unsent")
  local client = release.client(id)
  if client then
    local counted = ended and prefill or 0 -- tokens of the answer, as the engine told them
    client.spend((tonumber(ARGV[CLIENT_TOKENS]) or unserved and -prompt or counted) - counted)
  end
  if ARGV[TO_SLOT] and outcome == "finished" then
    (include "settle/learn_link")(prefix, slot, tonumber(ARGV[TO_SLOT]), tonumber(ARGV[MOVED_TOKENS]),
      tonumber(ARGV[MOVED_S]))
  end
  local session = ARGV[SESSION_ID]
  if session and session ~= "" then
    (include "settle/session")(prefix, now, session, ARGV[FINISH], tonumber(ARGV[CONTEXT_TOKENS]) or 0)
  end
end

-- Tell whether the worker is approximate and has computed the prompt. If so, note the prompt in its mirror: at the end
-- of the request, because engines evict in the order in which requests end.
local function mirrors()
  if not row or outcome ~= "finished" and stage == STAGE_BOOKED then return false end
  local row_slot, flags = struct.unpack(ROW_SLOT_TO_FLAGS, row, SLOT_AT)
  if row_slot ~= slot or bit.band(flags, FLAG_APPROXIMATE) == 0 then return false end
  local now_us, held = time[1] * 1000000 + time[2], tonumber(ARGV[HELD_BLOCKS])
  local blocks, capacity, busy_share, evicted = struct.unpack(ROW_BLOCKS_TO_EVICTED, row, BLOCKS_AT)
  local kept, full = (include "settle/mirror")(prefix, id, { slot = slot, blocks = blocks, capacity = capacity,
    now_us = now_us, lacks = held and held + 1, asked_us = now_us - 1000 * (tonumber(ARGV[AGE_MS]) or 0) })
  if kept ~= blocks or full > 0 then
    local packed = struct.pack(ROW_BLOCKS_TO_EVICTED, kept, capacity, busy_share, math.min(evicted + full, MAX_EVICTED))
    change(worker, BLOCKS_AT, packed, AFTER_EVICTED)
  end
  return true
end

-- Engines report blocks in order, so if the index has the lease's last block hash, it has all of them. The lease then
-- stops counting for these blocks, or decide would take them for cached even after their eviction.
local deepest = #lease >= at + length and lease:sub(-8)
local unreported = not mirrors() and outcome == "finished" and deepest
  and call("SISMEMBER", prefix .. "b:" .. deepest, string.format("%d", slot)) == 0
local kept_stage = starts and STAGE_STARTED or unreported and STAGE_LINGERING
if kept_stage then
  local head = struct.pack(LEASE, epoch, slot, 0, decode, matched, prompt, kept_stage, length)
  call("HSET", lease_key, id, head .. lease:sub(at))
  if kept_stage == STAGE_LINGERING then
    call("ZADD", leases_key, string.format("%d", now + linger_ms), id)
  end
else
  call("ZREM", leases_key, id)
  if deepest then release.speculation(id, lease) end
end
if kept_stage == STAGE_STARTED then return { "STARTED" } end
return { "SETTLED", matched >= JUDGED and matched - JUDGED or nil }
