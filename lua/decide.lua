--[[
decide: choose a worker for one request and book its load, in one step for the whole fleet.

Guarantee: as if decisions were made one after another; the same state and the same request give the same choice; a
known id gets its stored answer, one that ended before books nothing. mode = 1 books nothing.
How: the matched tokens of every worker, by bisection of the chain (exact while a worker's set is prefix-closed, else
the winner is verified and the choice made again, at most twice); blocks that open reservations will make (x: at the
checkpoints of a chain, the chains of leases between them) count as held. Then the policy chooses; cost takes the
predicted seconds to first token, lowest wins:
  (wait_price*wait + lambda*uncached + kappa*(tokens that another worker is making - own match)
  + pressure_price*overfill*prompt) / speed + wait_price*decode_s_per_token * decode tokens
wait: prefill booked there, less what is done of the one under way by time and speed; lambda is 1 while some worker
waits for work; overfill: how much fuller (0..1) its cache is than the mean. Costs within max(1 block, 2 % of the
prompt, 5 ms) of the lowest are equal: then the session's home (the first of `order` that is a candidate) wins, then the
least evicting, the least filled, the least in flight, a hash of the seed. Who stays under objective_s at the least load
is not traded for a bigger hit.
Its steps are parts (parts/decide, parts/shared): `include "<name>"` is replaced by the part's text, as a function's
body; it
stands where the part is needed: to make the functions of all at every call was 3 % of its time.

KEYS: alive load workers servers leases lease tick counts queue
ARGV: prefix, id, policy, prompt_tokens, decode_tokens, lease_ms, ttl_ms, max_probes, mode (0 book, 1 dry, 2 book and
      tell all rows), exclude (ids joined by commas), seed (integer), lambda, kappa, pressure_price, decode_s_per_token,
      wait_price, prefix_tokens (useful at most; 0: all), min_match_tokens (useful at least), order (ids joined by
      commas: where a hash ring would look, first to last), objective_s (time to first token that is enough; 0:
      none), tenant (8 bytes), priority (0 first, 15 last), max_engine_wait_s (0: no queue), block_sizes (scheme=tokens
      joined by commas), queue_max (tickets), waited_ms (so far), ticket_ms, barred (those of exclude that can never
      serve it, for its ticket: not who only failed a moment ago),
      then for each of <= 4 chains: scheme id, block_tokens, packed 8-byte hashes (<= 8192)
Returns: {BOOKED or KNOWN, worker_id, matched_tokens, speculative 0/1, flagged 0/1, cost_s, url, wait_tokens,
      prompt_tokens, prefill_tokens booked, decode_tokens, flags, why}, in mode 2 then what DRY tells after why;
      {QUEUED, FULL or DISPLACED, tickets that wait, ms of work in them}: nothing is booked; QUEUED: it has a ticket;
      {DRY, worker_id, why, {median speed, block_tokens, turn, ms}, {worker_id, matched_tokens, speculative_tokens, load
      row, cost_s}...}: all that the choice saw
Cost: O(workers + max_probes + checkpoints), while tickets wait 256 of them more; at most 8 leases reaped
Keys that depend on data: b:<hash>, x:<hash>, s:<slot>, c:<slot>:<id>
--]]
local alive_key, load_key, workers_key, servers_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local leases_key, lease_key, tick_key, counts_key, queue_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local prefix, id, policy, prompt, decode_tokens = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local lease_ms, ttl_ms, max_probes, mode = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local exclude, seed, lambda, kappa = ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local pressure_price, decode_s, wait_price = tonumber(ARGV[14]), tonumber(ARGV[15]), tonumber(ARGV[16])
local prefix_tokens, min_match, order = tonumber(ARGV[17]), tonumber(ARGV[18]), ARGV[19]
local objective_s, tenant, priority = tonumber(ARGV[20]), ARGV[21], tonumber(ARGV[22])
local max_engine_wait_s, block_sizes, queue_max = tonumber(ARGV[23]), ARGV[24], tonumber(ARGV[25])
local waited_ms, ticket_ms, barred = tonumber(ARGV[26]), tonumber(ARGV[27]), ARGV[28]

local LEASE, TOMBSTONE, APPROXIMATE, MAX_REAPED, FIRST_CHAIN = ">I4I4I4I4I4I4BB", 3, 16, 8, 29
local POLICIES = { cost = 1, least_loaded = 1, round_robin = 1, random = 1, power_of_two = 1, session = 1, sticky = 1,
  two_state = 1, prefix_affinity = 1, chwbl = 1 }
local call, unpack_from, sub, floor, band = redis.call, struct.unpack, string.sub, math.floor, bit.band
local max, format = math.max, string.format

if id == "" or not POLICIES[policy] or not (prompt and decode_tokens and lease_ms and ttl_ms and max_probes and mode
    and seed and lambda and kappa and pressure_price and decode_s and wait_price and prefix_tokens and min_match
    and objective_s and tenant and priority and max_engine_wait_s and block_sizes and queue_max and waited_ms
    and ticket_ms)
    or max_engine_wait_s > 0 and (#tenant ~= 8 or priority < 0 or priority > 15)
    or #ARGV > FIRST_CHAIN + 11
    or not (prompt >= 1 and prompt < 2147483648 and decode_tokens >= 0 and decode_tokens < 2147483648) then
  return redis.error_reply("BAD_ARGUMENT decide: an id, a policy it knows and twenty numbers, at most four chains")
end

local rows_of, match, choose = include "shared/candidates", include "decide/prefix_match", include "decide/cost_rule"
local alive_rows, verify = include "shared/alive_workers", include "decide/verified_choice"
local book = include "decide/reserve"

-- Cut out of the record, which may be long: its other fields concern nobody here.
local function url_of(worker, flags)
  local record = band(flags, APPROXIMATE) ~= 0 and call("HGET", workers_key, worker)
    or call("HGET", servers_key, worker:match("^(.*)%.") or "") or ""
  local _, before = record:find('"url":"', 1, true)
  return before and (record:match('^[^"]*', before + 1):gsub("\\/", "/")) or ""
end

local known = mode ~= 1 and call("HGET", lease_key, id)
if known then
  local _, _, prefill, decode, own, tokens, stage, length, at = unpack_from(LEASE, known)
  if stage == TOMBSTONE then return redis.error_reply("CANCELLED " .. id .. " ended before it was booked") end
  local worker = sub(known, at, at + length - 1)
  local flags = unpack_from(">I2", call("HGET", load_key, worker) or ("\0"):rep(58), 21)
  return { "KNOWN", worker, own, 0, 0, "0", url_of(worker, flags), 0, tokens, prefill, decode, flags, "known" }
end
local time = call("TIME")
local now = time[1] * 1000 + floor(time[2] / 1000)
local expired = call("ZRANGEBYSCORE", leases_key, "-inf", now, "LIMIT", 0, MAX_REAPED)
if expired[1] then (include "shared/release_lease")(load_key, leases_key, lease_key, prefix, now).reap(expired) end

local all, alive, median = alive_rows(alive_key, load_key, tick_key, now, ttl_ms, exclude)
local s = rows_of(all, alive, median, decode_s, now)
if s.count == 0 then return redis.error_reply("NO_WORKER none of " .. #all .. " workers is alive and routable") end

-- While all are saturated, or others wait whose turn is before, it waits in its replica.
local wait, served
s.waits = max_engine_wait_s > 0
  and (call("ZCARD", queue_key) > 0 or not (include "shared/capacity")(s, max_engine_wait_s, block_sizes, true))
if s.waits and mode ~= 1 then
  local function everybody()
    if exclude == "" then return s end
    local everyone = select(2, alive_rows(alive_key, load_key, tick_key, now, ttl_ms, ""))
    return rows_of(all, everyone, median, decode_s, now)
  end
  local now_us, wait_turn = time[1] * 1000000 + time[2], include "decide/wait_turn"
  wait, served = wait_turn(s, everybody, queue_key, leases_key, id, now_us, {
    priority = priority, tenant = tenant, tokens = prompt, barred = barred, waited_ms = waited_ms,
    queue_max = queue_max, limit_s = max_engine_wait_s, block_sizes = block_sizes, ticket_ms = ticket_ms,
  })
  if wait then return wait end
end

s.policy, s.prompt, s.seed, s.lambda, s.kappa, s.pressure_price = policy, prompt, seed, lambda, kappa, pressure_price
s.wait_price = wait_price
s.prefix_tokens, s.min_match, s.order, s.objective_s = prefix_tokens, min_match, order, objective_s
s.turn = policy == "round_robin" and tonumber(call("HGET", counts_key, "round_robin") or 0) or 0
local wrong = match(s, prefix, prompt, max_probes, FIRST_CHAIN)
if wrong then return wrong end
local w, why, saw = verify(s, prefix, choose)
local worker, flags = sub(s.rows[w], 59), unpack_from(">I2", s.rows[w], 21)

if mode == 1 then return (include "decide/dump_state")(s, { "DRY", worker, why }, w, saw) end
local prefill = book(s, w, load_key, leases_key, lease_key, prefix, id, decode_tokens, now + lease_ms)
if served then served(prefill + max(0, decode_tokens - prompt)) end
if policy == "round_robin" then call("HINCRBY", counts_key, "round_robin", 1) end
local answer = { "BOOKED", worker, s.matched[w] or 0, s.speculated[w] and 1 or 0, s.flagged, format("%.6f", s.cost[w]),
  url_of(worker, flags), s.wait[w], prompt, prefill, decode_tokens, flags, why }
return mode == 2 and (include "decide/dump_state")(s, answer, w, saw) or answer
