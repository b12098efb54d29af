--[[
renew: keeps the leases of running requests alive, in bulk, and books anew those that Redis has lost.

Guarantee: a known open lease gets a new expiry, also one whose end its engine has reported: its replica still sends
the answer, and will settle it. If its replica says that the first token came and the lease does not
say so, the lease becomes STARTED; nothing else changes. An unknown id is booked anew on its worker with the figures of
the replica: so reservations are rebuilt after Redis came back empty. Refused are a tombstone (the request ended before
it was booked), a lingering lease (the request is finished), and an unknown id on a forgotten worker.

ARGV: prefix, lease_ms, then per reservation: id, worker_id, prefill_tokens (still booked), decode_tokens, stage (0, 1)
Returns: {number of leases renewed, number rebuilt, number refused}
Cost: O(ids * log leases), at most 200 ids
Keys that depend on data: client:<tag>, tokens:<tag>
--]]
local load_key, leases_key, lease_key = unpack(KEYS)
local prefix, lease_ms = ARGV[1], tonumber(ARGV[2])

local FIRST_RESERVATION, RESERVATION_FIELDS, MAX_RESERVATIONS = 3, 5, 200
local call = redis.call

if not lease_ms or (#ARGV + 1 - FIRST_RESERVATION) % RESERVATION_FIELDS ~= 0
    or #ARGV >= FIRST_RESERVATION + MAX_RESERVATIONS * RESERVATION_FIELDS then
  return redis.error_reply("BAD_ARGUMENT renew takes a prefix, lease_ms and at most 200 times five values")
end
for i = FIRST_RESERVATION, #ARGV, RESERVATION_FIELDS do
  local prefill, decode, stage = tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), ARGV[i + 4]
  if not prefill or not decode or prefill < 0 or decode < 0 or (stage ~= "0" and stage ~= "1") then
    return redis.error_reply("BAD_ARGUMENT malformed reservation " .. ARGV[i])
  end
end
local time = call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expiry = now + lease_ms

-- Extend the lease, and with it the count of the request as in flight for its client.
local function keep(id)
  call("ZADD", leases_key, expiry, id)
  if #id >= CLIENT_AT then (include "shared/client_use")(prefix, id, now).renew(expiry) end
end

local add_load = (include "shared/row_load")(load_key, now)

-- Book a reservation that Redis has lost on the row of its worker; return false if the worker is gone.
local function rebuild(id, worker, prefill, decode, stage)
  if stage == STAGE_STARTED then prefill = 0 end
  local epoch, slot = add_load(worker, nil, prefill, decode, 1)
  if not epoch then return false end
  call("HSET", lease_key, id, struct.pack(LEASE, epoch, slot, prefill, decode, 0, 0, stage, #worker) .. worker)
  keep(id)
  return true
end

-- Give back the booked prefill and set the stage STARTED, as settle does with a first token.
local function start(id, lease)
  local epoch, slot, prefill, decode, matched, prompt, _, length, at = struct.unpack(LEASE, lease)
  add_load(lease:sub(at, at + length - 1), epoch, -prefill, 0, 0)
  local head = struct.pack(LEASE, epoch, slot, 0, decode, matched, prompt, STAGE_STARTED, length)
  call("HSET", lease_key, id, head .. lease:sub(at))
end

call("ZREM", leases_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
local renewed, rebuilt, refused = 0, 0, 0
for i = FIRST_RESERVATION, #ARGV, RESERVATION_FIELDS do
  local id = ARGV[i]
  local lease = call("HGET", lease_key, id)
  if lease then
    local stage = lease:byte(LEASE_STAGE_AT)
    if stage == STAGE_BOOKED and ARGV[i + 4] == "1" then start(id, lease) end
    if stage < STAGE_LINGERING or stage == STAGE_ENDED then
      keep(id)
      renewed = renewed + 1
    else
      refused = refused + 1
    end
  elseif rebuild(id, ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4])) then
    rebuilt = rebuilt + 1
  else
    refused = refused + 1
  end
end
return { renewed, rebuilt, refused }
