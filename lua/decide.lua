--[[
decide: choose a worker for one request and book its load, in one step for the whole fleet.

Guarantee: as if decisions were made one after another; the same state and the same request give the same choice; an id
that is known gets its stored answer, one that was cancelled books nothing. dry = 1 books nothing and tells all rows.
How: matched tokens of every worker by bisection of the chain, breadth first, a group of workers at a time (exact while
a worker's blocks are prefix-closed; else the winner is verified and the choice made again at most twice). Blocks that
open reservations will make (x:, at checkpoints of a chain) count as held. Then the cost in predicted seconds:
  (wait + lambda*uncached + kappa*busyness*(best match - own match) + pressure_price*overfill*prompt) / speed
  + decode_s_per_token * decode tokens, where busyness = min(1, wait of all workers / prompt) and overfill is how much
fuller (0..1) its cache is than the mean. Costs within max(1 block, 2 % of the prompt, 5 ms) are equal: then the least
evicting, the least filled, the least in flight, a hash of the seed.

KEYS: alive load workers servers leases lease tick counts
ARGV: prefix, reservation id, policy (cost, least_loaded, round_robin), prompt_tokens, decode_tokens, lease_ms, ttl_ms,
      max_probes, dry (0/1), exclude (worker ids joined by commas), seed (integer), lambda, kappa, pressure_price,
      decode_s_per_token, then for each of <= 4 chains: scheme id, block_tokens, packed 8-byte hashes (<= 8192)
Returns: {BOOKED or KNOWN, worker_id, matched_tokens, speculative 0/1, flagged 0/1, cost_s, url, wait_tokens,
         prompt_tokens, prefill_tokens booked, decode_tokens, flags} or {DRY, worker_id, row...}, see lua/README.md
Cost: O(workers + max_probes + checkpoints); at most 8 leases reaped
Keys that depend on data: b:<hash>, x:<hash>, s:<slot>
--]]
local alive_key, load_key, workers_key, servers_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local leases_key, lease_key, tick_key, counts_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local prefix, id, policy, prompt, decode_tokens = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local lease_ms, ttl_ms, max_probes, dry = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9] == "1"
local exclude, seed, lambda, kappa = ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local pressure_price, decode_s = tonumber(ARGV[14]), tonumber(ARGV[15])

local ROW, LEASE = ">I4i4i4i4I4I2I4I4I4I4I4I4I4", ">I4I4I4I4I4I4BB"
local GRACE_GAP_MS, SPECULATION_MS, VERIFY_BLOCKS, MAX_WORKERS = 1000, 3600000, 2048, 4096
local STARTED, TOMBSTONE, CLOSED = 1, 3, 32
local call, unpack, unpack_row, sub, floor, band = redis.call, unpack, struct.unpack, string.sub, math.floor, bit.band
local huge, max, min = math.huge, math.max, math.min

if id == "" or not (prompt and decode_tokens and lease_ms and ttl_ms and max_probes and seed and lambda and kappa
    and pressure_price and decode_s) or prompt < 1 or decode_tokens < 0 or #ARGV > 27 or (#ARGV - 15) % 3 ~= 0 then
  return redis.error_reply("BAD_ARGUMENT decide: a number is missing or out of range")
end
for i = 16, #ARGV, 3 do
  if not tonumber(ARGV[i]) or #ARGV[i + 2] % 8 ~= 0 or #ARGV[i + 2] > 65536 or (tonumber(ARGV[i + 1]) or 0) < 1 then
    return redis.error_reply("BAD_ARGUMENT decide: malformed chain")
  end
end
if policy ~= "cost" and policy ~= "least_loaded" and policy ~= "round_robin" then
  return redis.error_reply("BAD_ARGUMENT unknown policy " .. policy)
end

-- The URL is cut out of the record, which may be long; its other fields concern nobody here.
local function url_of(worker_id, flags)
  local record = band(flags, 16) ~= 0 and call("HGET", workers_key, worker_id)
    or call("HGET", servers_key, (worker_id:gsub("%.%d+$", ""))) or ""
  local _, from = record:find('"url":"', 1, true)
  return from and (record:match('^[^"]*', from + 1):gsub("\\/", "/")) or ""
end

local known = call("HGET", lease_key, id)
if known and not dry then
  local _, _, prefill, decode, matched, prompt_known, stage, length, at = unpack_row(LEASE, known)
  if stage == TOMBSTONE then return redis.error_reply("CANCELLED " .. id .. " was given up before it was booked") end
  local worker = sub(known, at, at + length - 1)
  local row = call("HGET", load_key, worker)
  local flags = row and unpack_row(">I2", row, 21) or 0
  return { "KNOWN", worker, matched, 0, 0, "0", url_of(worker, flags), 0, prompt_known, prefill, decode, flags }
end

local time = call("TIME")
local now = time[1] * 1000 + floor(time[2] / 1000)

-- Add to the sums of a worker's row, if it is still the incarnation of load (epoch) that the lease was booked on.
local function add_load(worker, epoch, prefill, decode, count)
  local row = call("HGET", load_key, worker)
  if not row then return end
  local row_epoch, row_prefill, row_decode, row_count = struct.unpack(">I4i4i4i4", row)
  if row_epoch ~= epoch then return end
  local head = struct.pack(">I4i4i4i4", epoch, row_prefill + prefill, row_decode + decode, row_count + count)
  call("HSET", load_key, worker, head .. row:sub(17))
end

-- 1 reap: what expired gives back its load and its speculation
local expired = call("ZRANGEBYSCORE", leases_key, "-inf", now, "LIMIT", 0, 8)
for i = 1, #expired do
  local lease = call("HGET", lease_key, expired[i])
  call("ZREM", leases_key, expired[i])
  call("HDEL", lease_key, expired[i])
  if lease then
    local epoch, slot, prefill, decode, _, _, stage, length, at = unpack_row(LEASE, lease)
    if stage <= STARTED then
      add_load(sub(lease, at, at + length - 1), epoch, -prefill, stage == STARTED and -decode or 0, -1)
    end
    slot = string.format("%d", slot)
    for from = at + length, #lease, 8 do
      local key = prefix .. "x:" .. sub(lease, from, from + 7)
      if call("HINCRBY", key, slot, -1) <= 0 then call("HDEL", key, slot) end
    end
  end
end

-- 2 the live, routable workers; nobody expires while the applier itself has been away
local ticked, grace_until, median = string.match(call("GET", tick_key) or "", "^(%d+) (%d+) (%d+)")
local grace = not ticked or now - ticked > GRACE_GAP_MS or ticked - now > 0 or grace_until - now > 0
local names = call("ZRANGEBYSCORE", alive_key, grace and "-inf" or now - ttl_ms, "+inf", "LIMIT", 0, MAX_WORKERS)
local rows = #names > 0 and call("HMGET", load_key, unpack(names)) or {}
median = tonumber(median) or 0
if median == 0 then median = 10000 end
local slowest, fastest = median / 8, median * 8
local excluded = exclude ~= "" and "," .. exclude .. ","
local count, total_wait, total_fill = 0, 0, 0
local name, wait, own_s, speed, fill, slots, by_slot, schemes, flags_of = {}, {}, {}, {}, {}, {}, {}, {}, {}
for i = 1, #names do
  local row = rows[i]
  if row then
    local _, prefill, decode, _, slot, flags, scheme, tps, foreign, foreign_decode, blocks, capacity =
      unpack_row(ROW, row)
    -- SERVER and URL, not DRAINING, not HOSTILE
    if band(flags, 139) == 3 and not (excluded and excluded:find("," .. names[i] .. ",", 1, true)) then
      count = count + 1
      tps = tps == 0 and median or (tps < slowest and slowest) or (tps > fastest and fastest) or tps
      prefill = prefill + foreign
      name[count], wait[count], speed[count], rows[count] = names[i], prefill, tps, row
      own_s[count] = decode_s * (decode + foreign_decode)
      local share = capacity > 0 and band(flags, 16) == 0 and blocks / capacity or 0
      fill[count], total_fill, total_wait = share, total_fill + share, total_wait + prefill
      -- PROVEN or APPROXIMATE: its blocks may be matched
      slots[count], flags_of[count], schemes[count] = slot, flags, band(flags, 20) ~= 0 and scheme or -1
      by_slot[slot] = count
    end
  end
end
if count == 0 then return redis.error_reply("NO_WORKER none of " .. #names .. " live workers is routable") end

-- 3 match: blocks confirmed (b:), then blocks that open reservations will make (x:), then tokens
local flagged = 0
local confirmed, speculated, matched, chain_of = {}, {}, {}, {}

-- Positions of a chain's checkpoints: blocks 1, 2, 4, every 8th to 64, every 32nd above, and the last (n).
local function checkpoints(n)
  local inner = n <= 2 and n - 1 or n <= 4 and 2 or n <= 64 and 3 + floor((n - 1) / 8) or 11 + floor((n - 65) / 32)
  return inner + 1, function(p)
    return p > inner and n or p <= 3 and 2 ^ (p - 1) or p <= 11 and 8 * (p - 3) or 64 + 32 * (p - 11)
  end
end

-- Deepest position of 1..last that each slot of `group` holds, `deep[slot]`: all hold the first. Widest gap first; when
-- the budget of probes is spent, a slot is left at what is proved.
local function bisect(verb, kind, hashes, last, block_of, group, deep, floor_of, budget)
  local groups, lows, highs, head, tail = { group }, { 1 }, { last + 1 }, 1, 1
  while head <= tail do
    local members, low, high = groups[head], lows[head], highs[head]
    if high - low <= 1 or budget <= 0 then
      if high - low > 1 then flagged = 1 end
      for k = 1, #members do deep[members[k]] = low end
    else
      budget = budget - 1
      local middle = head == 1 and last or floor((low + high) / 2)
      local block = block_of and block_of(middle) or middle
      local held = call(verb, kind .. sub(hashes, block * 8 - 7, block * 8), unpack(members))
      local up, down, ups, downs = {}, {}, 0, 0
      for k = 1, #members do
        local slot = members[k]
        if (held[k] and held[k] ~= 0) or (floor_of and (floor_of[slot] or 0) >= block) then
          ups = ups + 1
          up[ups] = slot
        else
          downs = downs + 1
          down[downs] = slot
        end
      end
      if ups > 0 then
        tail = tail + 1
        groups[tail], lows[tail], highs[tail] = up, middle, high
      end
      if downs > 0 then
        tail = tail + 1
        groups[tail], lows[tail], highs[tail] = down, low, middle
      end
    end
    head = head + 1
  end
  return budget
end

-- Slots of `members` that are live workers of this scheme.
local function live(members, scheme)
  local group = {}
  for k = 1, #members do
    local i = by_slot[tonumber(members[k])]
    if i and schemes[i] == scheme then group[#group + 1] = members[k] end
  end
  return group
end

local b, x, probes, probes_x = prefix .. "b:", prefix .. "x:", max_probes, floor(max_probes / 2)
for c = 16, #ARGV, 3 do
  local scheme, size, hashes = tonumber(ARGV[c]), tonumber(ARGV[c + 1]), ARGV[c + 2]
  local n, deep, reach = #hashes / 8, {}, {}
  chain_of[scheme] = c
  if n > 0 then
    local first = sub(hashes, 1, 8)
    local group = live(call("SMEMBERS", b .. first), scheme)
    if #group > 0 then probes = bisect("SMISMEMBER", b, hashes, n, nil, group, deep, nil, probes) end
    local coming = live(call("HKEYS", x .. first), scheme)
    if #coming > 0 then
      local last, block_of = checkpoints(n)
      probes_x = bisect("HMGET", x, hashes, last, block_of, coming, reach, deep, probes_x)
      for k = 1, #coming do
        local slot = coming[k]
        local i, block = by_slot[tonumber(slot)], block_of(reach[slot])
        if block > (deep[slot] or 0) then speculated[i], matched[i] = block, min(block * size, prompt) end
      end
    end
    for k = 1, #group do
      local i, depth = by_slot[tonumber(group[k])], deep[group[k]]
      confirmed[i] = depth
      if not speculated[i] then matched[i] = min(depth * size, prompt) end
    end
  end
end

-- 4 choose: the lowest cost; what costs the same goes to the least pressed cache
local cost, slack, turn = {}, max(tonumber(ARGV[17]) or 1, 0.02 * prompt), nil
if policy == "round_robin" then
  turn = {}
  for i = 1, count do turn[i] = i end
  table.sort(turn, function(p, q) return name[p] < name[q] end)
  turn = turn[(call("HGET", counts_key, "round_robin") or 0) % count + 1]
end
local function choose()
  local best, lowest, tie = 0, huge, 0
  for i = 1, count do best = max(best, matched[i] or 0) end
  local busy, mean_fill = kappa * min(1, total_wait / prompt), total_fill / count
  for i = 1, count do
    local own = matched[i] or 0
    local tokens = wait[i] + lambda * (prompt - own) + busy * (best - own)
    cost[i] = (tokens + pressure_price * max(0, fill[i] - mean_fill) * prompt) / speed[i] + own_s[i]
    if cost[i] < lowest then lowest, tie = cost[i], max(slack / speed[i], 0.005) end
  end
  if turn then return turn end
  local rank = policy == "cost" and cost or wait
  local bar = policy == "cost" and lowest + tie or min(unpack(wait))
  local winner, evicted, full, flight, hash
  for i = 1, count do
    if rank[i] <= bar then
      local e, f = 0, 0
      if policy == "cost" then e, f = unpack_row(">I4", rows[i], 47), fill[i] end
      local n = unpack_row(">i4", rows[i], 13)
      -- seed and slot, mixed by a square: a linear mix would let some slots win more often
      local h = (seed * 40503 + slots[i] * 2654435769) % 4294967291 % 67108859
      h = h * h % 4294967291
      if not winner or e < evicted or (e == evicted and (f < full or (f == full and (n < flight
          or (n == flight and h < hash))))) then
        winner, evicted, full, flight, hash = i, e, f, n, h
      end
    end
  end
  return winner
end

-- How many of its confirmed blocks a worker really holds in a row: its set has holes.
local budget = VERIFY_BLOCKS
local function verify(i, hashes)
  local whole = 0
  while whole < confirmed[i] and budget > 0 do
    local upto, chunk = min(whole + min(512, budget), confirmed[i]), {}
    for block = whole + 1, upto do chunk[block - whole] = sub(hashes, block * 8 - 7, block * 8) end
    budget = budget - #chunk
    local held = call("SMISMEMBER", prefix .. "s:" .. string.format("%d", slots[i]), unpack(chunk))
    for k = 1, #held do
      if held[k] == 0 then return whole + k - 1 end
    end
    whole = upto
  end
  if whole < confirmed[i] then flagged = 1 end
  return whole
end

local w, checked = nil, {}
for _ = 1, 3 do
  w = choose()
  if checked[w] or not confirmed[w] or band(flags_of[w], CLOSED) ~= 0 then break end
  checked[w] = true
  local hashes, size = ARGV[chain_of[schemes[w]] + 2], tonumber(ARGV[chain_of[schemes[w]] + 1])
  local whole = verify(w, hashes)
  if whole == confirmed[w] then break end
  confirmed[w] = whole
  if not speculated[w] then matched[w] = min(whole * size, prompt) end
end
local own, at = matched[w] or 0, chain_of[schemes[w]]
if dry then
  local answer = { "DRY", name[w] }
  for i = 1, count do
    local _, prefill, decode, flight, _, flags, _, tps, foreign, _, blocks, capacity = unpack_row(ROW, rows[i])
    local size = chain_of[schemes[i]] and ARGV[chain_of[schemes[i]] + 1] or 0
    answer[i + 2] = { name[i], matched[i] or 0, min((speculated[i] or 0) * size, prompt), prefill, decode, flight,
      foreign, tps, blocks, capacity, flags, string.format("%.6f", cost[i]) }
  end
  return answer
end

-- 5 book: the load, the lease, and the checkpoints that this reservation will make beyond what is confirmed. Block 1
-- always: it tells whether anyone makes anything of a chain.
call("ZREM", leases_key, id) -- a first write that frees memory is allowed when Redis is full, so are those after it
if turn then call("HINCRBY", counts_key, "round_robin", 1) end
local made, slot = {}, string.format("%d", slots[w])
if at and #ARGV[at + 2] > 0 then
  local hashes, held = ARGV[at + 2], confirmed[w] or 0
  local last, block_of = checkpoints(#hashes / 8)
  for p = 1, last do
    local block = block_of(p)
    if p == 1 or block > held then
      local hash = sub(hashes, block * 8 - 7, block * 8)
      made[#made + 1] = hash
      if call("HINCRBY", x .. hash, slot, 1) == 1 then call("PEXPIRE", x .. hash, SPECULATION_MS) end
    end
  end
end
local epoch, prefill, decode, flight = unpack_row(">I4i4i4i4", rows[w])
local row = struct.pack(">I4i4i4i4", epoch, prefill + prompt - own, decode, flight + 1) .. sub(rows[w], 17)
call("HSET", load_key, name[w], row)
local lease = struct.pack(LEASE, epoch, slots[w], prompt - own, decode_tokens, own, prompt, 0, #name[w])
call("HSET", lease_key, id, lease .. name[w] .. table.concat(made))
call("ZADD", leases_key, now + lease_ms, id)
return { "BOOKED", name[w], own, speculated[w] and 1 or 0, flagged, string.format("%.6f", cost[w]),
  url_of(name[w], flags_of[w]), wait[w], prompt, prompt - own, decode_tokens, flags_of[w] }
