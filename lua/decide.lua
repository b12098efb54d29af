--[[
decide: chooses a worker for one request and books the request's load there, in one atomic step for the whole fleet.
In a fleet whose engines hand prompts over, it may choose two: one computes the prompt, the other takes over from it
(decide/joint). Then it books both, each as a reservation of its own.

Guarantee: decisions take effect as if they were made one after another. The same state and the same request give the
same choice. An id that is booked already gets its stored answer, unless its engine has reported its end: then it is
booked anew. An id that ended before it was booked books nothing.
Steps (each a part, see lua/README.md; before step 2 shared/client_limits may refuse a client over its limits):
1. shared/candidates: the workers that are alive and routable, with what is booked on each.
2. decide/prefix_match: how much of the prompt each candidate holds, or will hold once open reservations are computed.
3. decide/cost_rule: the choice; decide/verified_choice checks the winner's match and may choose again. While the ledger
   of sessions binds, decide/session may choose the engine of the request's session, or hold the request.
4. decide/wait_turn, only while other requests wait or the choice has no room: the request may have to wait.
5. decide/reserve: the choice is booked. The reservation of the engine that only computes the prompt (the prefill leg)
   has the request's id with the mark PREFILL_LEG and without a client's tag: settle ends it, and renew extends it, like
   any other. Its context stays booked after its first token until it ends: the engine keeps the blocks until the other
   engine has taken them.

ARGV: prefix, id, constants (of this replica, packed: shared/constants), policy, prompt_tokens, decode_tokens,
      mode (0 BOOK; 1 DRY: books nothing; 2 EXPLAIN: books, and returns all that the choice saw as well),
      exclude (ids of workers not to choose, joined by commas), seed (integer),
      prefix_tokens (most tokens of a match that count; 0: all count),
      order (ids of workers, joined by commas, in the order in which a hash ring would try them),
      objective_s (a time to first token that is short enough; 0: none),
      tenant (8 bytes; empty: the request never waits, even if others wait), priority (0 first, 15 last),
      waited_ms (time that the request has waited so far), may_wait (if it finds no room, 0: it gets no ticket; 1: it
      gets one, in a full queue in place of another if that is fair; 2: it gets one if the queue is not full),
      barred (the ids in exclude that can never serve the request, unlike a worker that only failed just now),
      limits (of the client's key, packed; empty: none; one byte more: the request was admitted before),
      session (empty: the request has no part in the ledger; else a byte, the sum of Hint values, and the session's id,
      empty if it is not known),
      only (ids of the workers to choose among, joined by commas; empty: all),
      ending (for each chain 8 bytes: the hash of the block with which the prompt ends, which the chain lacks, because
      only tiers are asked for it; zeros: the prompt does not end with a block; empty: it does so for no chain),
      split (0: the roles of engines do not count; 1: they do, but the request must be served by one engine; 2: it may
      be split, if the policy is cost),
      then for each of <= 4 chains: scheme id (each once), block_tokens, packed 8-byte hashes (<= 8192)
Returns: {BOOKED or KNOWN, worker_id, matched_tokens, speculative 0/1, flagged 0/1, cost_s, url, wait_tokens,
      prompt_tokens, prefill_tokens booked, decode_tokens booked, flags, why, session's id (empty: none), what of the
      match must be loaded from a tier (tokens, seconds and number of the kind of tier; empty: nothing), the prefill leg
      (empty: the request is not split): {worker_id, url, matched_tokens, speculative 0/1, wait_tokens, prefill_tokens
      and decode_tokens booked, flags, load from a tier as above}}, in mode 2
      then what DRY returns after why; for a client with limits, last of all {requests of the client in flight, tokens
      that it has used}; or
      {QUEUED, FULL or DISPLACED, number of waiting tickets, ms of work in them, price of the turn in seconds
      (decide/wait_turn), matched_tokens, session's id (missing: none)}: nothing is booked, and only with QUEUED the
      request has a ticket; or
      {HELD, session's id, number of sessions before it in the line, sessions in the line, ms until its turn as
      predicted, 1 if it was paused, else 0}: nothing is booked, and hold tells its turn; or
      {LIMITED, CONCURRENCY or TOKENS, how much of that limit is used, ms until the request may pass}: nothing is
      booked; or {DRY, worker_id, why, then the state of the choice as decide/dump_state describes it}
Cost: O(workers + max_probes + checkpoints), also 256 tickets while tickets wait; at most 8 leases reaped
Keys that depend on data: b:<hash>, e:<hash>, x:<hash>, s:<slot>, c:<slot>:<id>, client:<tag>, tokens:<tag>, sessions,
      session_line, places, way:<tenant><hash>, running:<worker_id>, links
--]]
local alive_key, load_key, workers_key, servers_key, leases_key, lease_key, tick_key, counts_key, queue2_key,
  sets_key, tiers_key = unpack(KEYS)
local prefix, id, constants, policy = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local prompt_tokens, decode_tokens, mode = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local exclude, seed, prefix_tokens, order = ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10]), ARGV[11]
local objective_s, tenant, priority = tonumber(ARGV[12]), ARGV[13], tonumber(ARGV[14])
local waited_ms, may_wait, barred, limits, session = tonumber(ARGV[15]), ARGV[16], ARGV[17], ARGV[18], ARGV[19]
local only, ending, split = ARGV[20], ARGV[21], tonumber(ARGV[22])

local LEG_PREFILL = 6 -- place of the booked prefill in what an answer tells of the prefill leg
local NO_HINT = "\0" -- of a request that may be of a session, but has no name and no tools
local FIRST_CHAIN, MAX_CHAINS, MAX_TOKENS = 23, 4, 2147483647
local call, unpack_from, sub, floor, band = redis.call, struct.unpack, string.sub, math.floor, bit.band
local max, format = math.max, string.format

if id == "" or policy ~= "cost" and not POLICIES[policy]
    or not (prompt_tokens and decode_tokens and mode and seed and prefix_tokens and order and objective_s and tenant
    and priority and waited_ms and may_wait and barred and limits and session and only and ending and split)
    or tenant ~= "" and (#tenant ~= 8 or priority < 0 or priority > 15)
    or #ARGV > FIRST_CHAIN + MAX_CHAINS * 3 - 1
    or limits ~= "" and (#limits < LIMITS_BYTES or #limits > LIMITS_BYTES + 1 or #id < CLIENT_AT)
    or not (prompt_tokens >= 1 and prompt_tokens <= MAX_TOKENS and decode_tokens >= 0 and decode_tokens <= MAX_TOKENS)
then
  return redis.error_reply("BAD_ARGUMENT decide: an id, a known policy, its numbers, and at most four chains")
end
local replica, refusal = (include "shared/constants")(constants)
if not replica then return refusal end

-- Parts that not every call needs are included where they are used: all of them here took 3 % of the script's time.
local candidates, match = include "shared/candidates", include "decide/prefix_match"
local choose, with_room = include "decide/cost_rule"
local alive_workers, verified_choice = include "shared/alive_workers", include "decide/verified_choice"
local reserve = include "decide/reserve"

-- The URL is cut out of the record's text, which may be long to decode, as decide needs no other field of the record.
local function url_of(worker, flags)
  local record = band(flags, FLAG_APPROXIMATE) ~= 0 and call("HGET", workers_key, worker)
    or call("HGET", servers_key, worker:match("^(.*)%.") or "") or ""
  local _, before = record:find('"url":"', 1, true)
  return before and (record:match('^[^"]*', before + 1):gsub("\\/", "/")) or ""
end

local known = mode ~= MODE_DRY and call("HGET", lease_key, id)
if known and known:byte(LEASE_STAGE_AT) ~= STAGE_ENDED then -- an id whose end its engine has reported is booked anew
  local _, _, prefill, decode, own, tokens, stage, length, worker_at = unpack_from(LEASE, known)
  if stage == STAGE_TOMBSTONE then return redis.error_reply("CANCELLED " .. id .. " ended before it was booked") end
  local worker = sub(known, worker_at, worker_at + length - 1)
  local flags = unpack_from(ROW_FLAGS, call("HGET", load_key, worker) or ("\0"):rep(ROW_BYTES), FLAGS_AT)
  local leg = split > 0 and (include "decide/prefill_leg")(load_key, leases_key, lease_key, id, url_of)() or ""
  return { "KNOWN", worker, own % JUDGED, 0, 0, "0", url_of(worker, flags), 0, tokens, prefill, decode, flags, "known",
    sub(session, 2), "", leg }
end
local time = call("TIME")
local now = time[1] * 1000 + floor(time[2] / 1000)
local expired = call("ZRANGEBYSCORE", leases_key, "-inf", format("%d", now), "LIMIT", "0", MAX_REAPED)
if expired[1] then (include "shared/release_lease")(load_key, leases_key, lease_key, prefix, now).reap(expired) end

local max_engine_wait_s = tenant ~= "" and replica.max_engine_wait_s or 0
local others_wait = max_engine_wait_s > 0 and call("ZCARD", queue2_key) > 0
local all, alive, median, least_tokens = alive_workers(alive_key, load_key, tick_key, now, replica.ttl_ms, exclude)
local block_tokens, chained = 1, ending ~= ""
for k = FIRST_CHAIN + 1, #ARGV, 3 do
  block_tokens, chained = max(block_tokens, tonumber(ARGV[k]) or 1), chained or ARGV[k + 1] ~= ""
end
local roles = split > 0 and replica.roles
local detailed = objective_s > 0 or mode >= MODE_DRY or others_wait or roles
local among, s = all, nil
if only ~= "" then among, barred = (include "decide/among")(all, only, barred) end
if roles and (split == 1 or policy ~= "cost") then
  local serving, others = (include "decide/by_role")(among, roles, barred)
  s, roles = candidates(serving, alive, median, replica, prompt_tokens, now, block_tokens, chained, detailed), nil
  -- An engine of the wrong role is better than none.
  if s.count > 0 then among, barred = serving, others else s = nil end
end
s = s or candidates(among, alive, median, replica, prompt_tokens, now, block_tokens, chained, detailed)
if s.count == 0 then return redis.error_reply("NO_WORKER none of " .. #among .. " workers is alive and routable") end

local client, per_minute
if limits ~= "" and mode ~= MODE_DRY then
  client = (include "shared/client_use")(prefix, id, now)
  local rate, refused = (include "shared/client_limits")(client, limits, prompt_tokens)
  if refused then return refused end
  per_minute = rate
end

s.policy, s.seed, s.prefix_tokens, s.order, s.objective_s = policy, seed, prefix_tokens, order, objective_s
s.terms = mode >= MODE_DRY and {} or nil
s.turn = policy == "round_robin" and tonumber(call("HGET", counts_key, "round_robin") or 0) or 0
local malformed = match(s, prefix, ending, prompt_tokens, replica.max_probes, FIRST_CHAIN, lease_key, sets_key,
  tiers_key)
if malformed then return malformed end
if roles then
  s.roles, s.answer, s.links_key = roles, max(0, decode_tokens - prompt_tokens), prefix .. "links"
  local believe = include "decide/believed_speeds"
  believe(s, roles)
end
local w, why, match_seen = verified_choice(s, prefix, choose)

local held, note_session -- an answer; a function to call once the request is booked, or must wait
if least_tokens and session ~= "" and (prompt_tokens >= least_tokens or session ~= NO_HINT)
    and tenant ~= "" and policy == "cost" then
  local engine
  local keeps = s.partner and s.partner[w] or w -- the candidate that would have the session's context
  held, engine, note_session = (include "decide/session")(s, keeps, { id = id, session = session, tenant = tenant,
    priority = priority, tokens = math.max(prompt_tokens, decode_tokens), chain = FIRST_CHAIN, prefix = prefix,
    leases_key = leases_key, came_ms = time[1] * 1000 + time[2] / 1000, dry = mode == MODE_DRY })
  if held and mode ~= MODE_DRY then return held end
  if engine and engine ~= keeps then
    w, why = s.towards and s.towards(engine) or engine, "place"
    match_seen = s.matched[w] or 0
  end
end

local served -- a function to call with the request's work once it is booked
-- A worker without prefill ahead has room in any case. With a policy that looks at no costs, a request does not wait
-- for room at its choice, only for room at any worker.
local is_idle = s.wait[w] == 0 or policy ~= "cost" and s.least_wait == 0
if not held and (others_wait or max_engine_wait_s > 0 and not is_idle) then
  local function has_room()
    local room_of = (include "shared/room")(s, max_engine_wait_s, replica.block_sizes)
    if policy == "cost" then return room_of(w) > 0 end
    for i = 1, s.count do
      if room_of(i) > 0 then return true end
    end
    return false
  end
  local function everybody()
    if exclude == "" and among == all and detailed then return s end
    local everyone, _ = alive, nil
    if exclude ~= "" then _, everyone = alive_workers(alive_key, load_key, tick_key, now, replica.ttl_ms, "") end
    return candidates(all, everyone, median, replica, prompt_tokens, now, block_tokens, false, true)
  end
  s.waits = others_wait or not has_room()
  if s.waits then
    if s.useless then barred = s.useless(barred) end
    local waits, chosen
    waits, chosen, served = (include "decide/wait_turn")(s, w, {
      id = id, priority = priority, tenant = tenant, tokens = prompt_tokens, barred = barred, rows = all,
      now_us = time[1] * 1000000 + time[2], waited_ms = waited_ms, constants = replica,
      queue_max = may_wait ~= "0" and replica.queue_max or 0, displaces = may_wait == "1",
      prefix = prefix, per_minute = per_minute, dry = mode == MODE_DRY,
    }, with_room, everybody, queue2_key, leases_key)
    if waits and mode ~= MODE_DRY then
      if note_session then waits[#waits + 1] = note_session() end
      return waits
    end
    s.waits, s.turn_s = waits ~= nil, waits and waits[4]
    if not waits and chosen ~= w then w, why, match_seen = chosen, "room", s.matched[chosen] or 0 end
  end
end
if why == "place" then -- for a replay of the decision
  s.room = {}
  for i = 1, s.count do s.room[i] = i == w and 1 or 0 end
end
local d = s.partner and s.partner[w] or w -- the candidate that makes the answer
local worker, flags = sub(s.rows[d], WORKER_ID_AT), unpack_from(ROW_FLAGS, s.rows[d], FLAGS_AT)

if mode == MODE_DRY then
  s.held = held
  return (include "decide/dump_state")(s, { "DRY", worker, why }, w, match_seen)
end
local expires_ms = now + replica.lease_ms
local leg = ""
if d ~= w then
  local _, book = (include "decide/prefill_leg")(load_key, leases_key, lease_key, id, url_of)
  leg = book(s, w, reserve, prefix, now, expires_ms)
end
local prefill, context = reserve(s, d, load_key, leases_key, lease_key, prefix, id, decode_tokens, expires_ms, d ~= w)
local noted = note_session and note_session(d, context) or ""
if served then served((leg ~= "" and leg[LEG_PREFILL] or prefill) + max(0, decode_tokens - prompt_tokens)) end
if policy == "round_robin" then call("HINCRBY", counts_key, "round_robin", 1) end
local tiers = s.tiers
local answer = { "BOOKED", worker, s.matched[d] or 0, s.speculated[d] and 1 or 0, s.flagged, format("%.6f", s.cost[w]),
  url_of(worker, flags), s.wait[d], prompt_tokens, prefill, context, flags, why, noted,
  tiers and tiers.tokens[d] and format("%d %.6f %d", tiers.tokens[d], tiers.seconds[d], tiers.kind[d]) or "", leg }
if mode == MODE_EXPLAIN then answer = (include "decide/dump_state")(s, answer, w, match_seen) end
if client then -- after `served`, which ended what the ticket counted
  client.hold(now + replica.lease_ms)
  local used = per_minute and client.spend(prompt_tokens, per_minute) or 0
  answer[#answer + 1] = { client.in_flight(), math.ceil(used) }
end
return answer
