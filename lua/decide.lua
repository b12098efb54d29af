--[[
decide: choose a worker for one request and book its load, in one step for the whole fleet.

Guarantee: as if decisions were made one after another; the same state and the same request give the same choice; a known
id gets its stored answer, one that was cancelled books nothing. dry = 1 books nothing and tells all rows.
How: matched tokens of every worker by bisection of the chain, a group of workers at a time, breadth first (exact while a
worker's set is prefix-closed; else the winner is verified and the choice made again, at most twice). Blocks that open
reservations will make (x:, at the checkpoints of a chain) count as held. Then the predicted seconds to first token:
  (wait + lambda*uncached + kappa*busyness*(best match - own match) + pressure_price*overfill*prompt) / speed
  + decode_s_per_token * decode tokens; busyness = min(1, wait of all workers / prompt), overfill = how much fuller (0..1)
its cache is than the mean. Costs within max(1 block, 2 % of the prompt, 5 ms) of the lowest are equal: then the least
evicting wins, then the least filled, the least in flight, a hash of the seed.

KEYS: alive load workers servers leases lease tick counts
ARGV: prefix, id, policy (cost, least_loaded, round_robin), prompt_tokens, decode_tokens, lease_ms, ttl_ms, max_probes,
      dry (0/1), exclude (worker ids joined by commas), seed (integer), lambda, kappa, pressure_price, decode_s_per_token,
      then for each of <= 4 chains: scheme id, block_tokens, packed 8-byte hashes (<= 8192)
Returns: {BOOKED or KNOWN, worker_id, matched_tokens, speculative 0/1, flagged 0/1, cost_s, url, wait_tokens,
      prompt_tokens, prefill_tokens booked, decode_tokens, flags} or {DRY, worker_id, row...}: see lua/README.md
Cost: O(workers + max_probes + checkpoints); at most 8 leases reaped
Keys that depend on data: b:<hash>, x:<hash>, s:<slot>
--]]
local alive_key, load_key, workers_key, servers_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local leases_key, lease_key, tick_key, counts_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local prefix, id, policy, prompt, decode_tokens = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local lease_ms, ttl_ms, max_probes, dry = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9] == "1"
local exclude, seed, lambda, kappa = "," .. ARGV[10] .. ",", tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local pressure_price, decode_s = tonumber(ARGV[14]), tonumber(ARGV[15])

local SUMS, LEASE = ">I4i4i4i4", ">I4I4I4I4I4I4BB" -- SUMS: the head of a load row
local GRACE_GAP_MS, SPECULATION_MS, VERIFY_BLOCKS = 1000, 3600000, 2048
local NO_LEASE = struct.pack(LEASE, 0, 0, 0, 0, 0, 0, 3, 0)
local STARTED, TOMBSTONE, CLOSED, APPROXIMATE = 1, 3, 32, 16
local call, unpack_from, sub, floor, band = redis.call, struct.unpack, string.sub, math.floor, bit.band
local max, min, format = math.max, math.min, string.format

if id == "" or not (prompt and decode_tokens and lease_ms and ttl_ms and max_probes and seed and lambda and kappa
    and pressure_price and decode_s) or prompt < 1 or decode_tokens < 0 or #ARGV > 27 or #ARGV % 3 ~= 0 then
  return redis.error_reply("BAD_ARGUMENT decide: a number is missing or out of range")
elseif policy ~= "cost" and policy ~= "least_loaded" and policy ~= "round_robin" then
  return redis.error_reply("BAD_ARGUMENT unknown policy " .. policy)
end

-- Cut out of the record, which may be long: its other fields concern nobody here.
local function url_of(worker, flags)
  local record = band(flags, APPROXIMATE) ~= 0 and call("HGET", workers_key, worker)
    or call("HGET", servers_key, (worker:gsub("%.%d+$", ""))) or ""
  local _, before = record:find('"url":"', 1, true)
  return before and (record:match('^[^"]*', before + 1):gsub("\\/", "/")) or ""
end

local known = call("HGET", lease_key, id)
if known and not dry then
  local _, _, prefill, decode, matched, tokens, stage, length, at = unpack_from(LEASE, known)
  if stage == TOMBSTONE then return redis.error_reply("CANCELLED " .. id .. " ended before it was booked") end
  local worker = sub(known, at, at + length - 1)
  local row = call("HGET", load_key, worker)
  local flags = row and unpack_from(">I2", row, 21) or 0
  return { "KNOWN", worker, matched, 0, 0, "0", url_of(worker, flags), 0, tokens, prefill, decode, flags }
end
local time = call("TIME")
local now = time[1] * 1000 + floor(time[2] / 1000)

-- 1 reap: what expired gives back its load (unless its worker joined anew: another epoch) and its speculation
for _, gone in ipairs(call("ZRANGEBYSCORE", leases_key, "-inf", now, "LIMIT", 0, 8)) do
  local lease = call("HGET", lease_key, gone)
  call("ZREM", leases_key, gone)
  call("HDEL", lease_key, gone)
  local epoch, slot, prefill, decode, _, _, stage, length, at = unpack_from(LEASE, lease or NO_LEASE)
  lease = lease or NO_LEASE
  local worker = sub(lease, at, at + length - 1)
  local row = stage <= STARTED and call("HGET", load_key, worker)
  if row and unpack_from(">I4", row) == epoch then
    local _, p, d, n = unpack_from(SUMS, row)
    row = struct.pack(SUMS, epoch, p - prefill, d - (stage == STARTED and decode or 0), n - 1) .. sub(row, 17)
    call("HSET", load_key, worker, row)
  end
  for from = at + length, #lease, 8 do
    local key, field = prefix .. "x:" .. sub(lease, from, from + 7), format("%d", slot)
    if call("HINCRBY", key, field, -1) <= 0 then call("HDEL", key, field) end
  end
end

-- 2 the live, routable workers; nobody expires while the applier itself has been away
local ticked, grace_until, median = string.match(call("GET", tick_key) or "", "^(%d+) (%d+) (%d+)")
local grace = not ticked or now - ticked > GRACE_GAP_MS or now - ticked < 0 or now - grace_until < 0
local pairs_of, since, alive = call("HGETALL", load_key), grace and "-inf" or now - ttl_ms, nil
if call("ZCOUNT", alive_key, since, "+inf") < #pairs_of / 2 then -- one read of 64 rows costs half of a read by name
  alive = {}
  for _, worker in ipairs(call("ZRANGEBYSCORE", alive_key, since, "+inf")) do alive[worker] = true end
end
median = tonumber(median) or 0
if median == 0 then median = 10000 end
local slowest, fastest, count, total_wait, total_fill = median / 8, median * 8, 0, 0, 0
local name, rows, base_s, speed, fill, by_scheme = {}, {}, {}, {}, {}, {}
for k = 1, #pairs_of, 2 do
  local worker, row = pairs_of[k], pairs_of[k + 1]
  local prefill, decode, _, slot, flags, scheme, tps, foreign, foreign_decode, blocks, capacity =
    unpack_from(">i4i4i4I4I2I4I4I4I4I4I4", row, 5)
  -- SERVER and URL, not DRAINING, not HOSTILE
  if band(flags, 139) == 3 and (not alive or alive[worker]) and (exclude == ",," or not
      exclude:find("," .. worker .. ",", 1, true)) then
    tps = tps == 0 and median or tps < slowest and slowest or tps > fastest and fastest or tps
    local wait, share = prefill + foreign, blocks / (capacity > 0 and capacity or 1)
    count = count + 1
    name[count], rows[count], speed[count], fill[count] = worker, row, tps, share
    base_s[count], total_wait, total_fill = wait / tps + decode_s * (decode + foreign_decode), total_wait + wait, total_fill + share
    if band(flags, 20) ~= 0 then -- PROVEN or APPROXIMATE: its blocks may be matched
      by_scheme[scheme] = by_scheme[scheme] or {}
      by_scheme[scheme][slot] = count
    end
  end
end
if count == 0 then return redis.error_reply("NO_WORKER none of " .. #pairs_of / 2 .. " workers is routable") end

-- 3 match: blocks that are confirmed (b:), then blocks that open reservations will make (x:), then tokens
local flagged, slack, confirmed, speculated, matched, chain_of = 0, 0.02 * prompt, {}, {}, {}, {}

local b, x = prefix .. "b:", prefix .. "x:"

-- A chain's checkpoints, deepest first: its last block n, every 512th above 2,048, every 128th above 512, every 32nd above
-- 64, every 8th, and 4, 2, 1.
local function checkpoints(n)
  local blocks, block = {}, n
  while block >= 1 do
    blocks[#blocks + 1] = block
    local step = block > 2048 and 512 or block > 512 and 128 or block > 64 and 32 or block > 8 and 8 or block > 4 and 4
      or block > 2 and 2 or 1
    block = floor((block - 1) / step) * step
  end
  return blocks
end

-- The blocks at which somebody's run ends, deepest first. Sets of holders are nested while workers are prefix-closed, so
-- between two sets of one size nobody's run ends; every open interval is halved once a round: the widest come first.
local budget = max_probes
local function ends_of(hashes, n, holders)
  local low, low_count, high, high_count, ends, tail, k = { 1 }, { holders }, { n + 1 }, { 0 }, {}, 1, 1
  while k <= tail do
    local l, h = low[k], high[k]
    if low_count[k] ~= high_count[k] then
      if h - l == 1 or budget <= 0 then
        ends[#ends + 1], flagged = l, h - l > 1 and 1 or flagged
      else
        local middle = k == 1 and n or floor((l + h) / 2) -- a prompt that was seen whole is common
        local here = call("SCARD", b .. sub(hashes, middle * 8 - 7, middle * 8))
        low[tail + 1], low_count[tail + 1], high[tail + 1], high_count[tail + 1] = middle, here, h, high_count[k]
        low[tail + 2], low_count[tail + 2], high[tail + 2], high_count[tail + 2] = l, low_count[k], middle, here
        tail, budget = tail + 2, budget - 1
      end
    end
    k = k + 1
  end
  table.sort(ends, function(p, q) return p > q end)
  return ends
end

-- The workers among the holders of a chain's first block, by slot, and their number.
local function starters(members, by_slot)
  local index_of, n = {}, 0
  for k = 1, #members do
    local i = by_slot[tonumber(members[k])]
    if i then index_of[members[k]], n = i, n + 1 end
  end
  return index_of, n
end

-- Give each of `wanted` workers its depth: the first of `blocks` (deepest first) that it holds, above floor_at.
local function deepest(verb, kind, hashes, blocks, index_of, wanted, floor_at)
  local depth = {}
  for k = 1, #blocks do
    local block = blocks[k]
    if wanted <= 0 or block <= floor_at then break end
    local members = call(verb, kind .. sub(hashes, block * 8 - 7, block * 8))
    for m = 1, #members do
      local i = index_of[members[m]]
      if i and not depth[i] then depth[i], wanted = block, wanted - 1 end
    end
  end
  return depth
end

for c = 16, #ARGV, 3 do
  local scheme, size, hashes = tonumber(ARGV[c]), tonumber(ARGV[c + 1]), ARGV[c + 2]
  if not scheme or not size or size < 1 or #hashes % 8 ~= 0 or #hashes > 65536 then
    return redis.error_reply("BAD_ARGUMENT decide: malformed chain")
  end
  local by_slot, n, first = by_scheme[scheme], #hashes / 8, sub(hashes, 1, 8)
  slack = max(slack, size)
  if by_slot and n > 0 then
    local holders, depth, reach, lowest = call("SMEMBERS", b .. first), {}, {}, n
    local index_of, wanted = starters(holders, by_slot)
    if wanted > 0 then
      depth = deepest("SMEMBERS", b, hashes, ends_of(hashes, n, #holders), index_of, wanted, 0)
    end
    index_of, wanted = starters(call("HKEYS", x .. first), by_slot)
    if wanted > 0 then
      for _, i in pairs(index_of) do lowest = min(lowest, depth[i] or 0) end
      reach = deepest("HKEYS", x, hashes, checkpoints(n), index_of, wanted, lowest)
    end
    for _, i in pairs(by_slot) do
      local sure, coming = depth[i] or 0, reach[i] or 0
      chain_of[i], confirmed[i], speculated[i] = c, sure, coming > sure and coming or nil
      matched[i] = min(max(sure, coming) * size, prompt)
    end
  end
end

-- 4 choose: the lowest cost; what costs the same goes to the least pressed cache
local cost, turn = {}, nil
if policy == "round_robin" then
  local order = {}
  for i = 1, count do order[i] = name[i] .. "\0" .. i end
  table.sort(order)
  turn = tonumber(order[(call("HGET", counts_key, "round_robin") or 0) % count + 1]:match("%d+$"))
end

local function wait_of(i) return (unpack_from(">i4", rows[i], 5)) + (unpack_from(">I4", rows[i], 31)) end

local function waits()
  local wait = {}
  for i = 1, count do wait[i] = wait_of(i) end
  return wait, min(unpack(wait))
end

local function choose()
  local best, lowest, tie = 0, math.huge, 0
  for i = 1, count do best = max(best, matched[i] or 0) end
  local busy, mean_fill = kappa * min(1, total_wait / prompt), total_fill / count
  for i = 1, count do
    local own = matched[i] or 0
    local tokens = lambda * (prompt - own) + busy * (best - own) + pressure_price * max(0, fill[i] - mean_fill) * prompt
    cost[i] = base_s[i] + tokens / speed[i]
    if cost[i] < lowest then lowest, tie = cost[i], max(slack / speed[i], 0.005) end
  end
  if turn then return turn end
  local rank, bar = cost, lowest + tie
  if policy == "least_loaded" then rank, bar = waits() end
  local winner, first
  for i = 1, count do
    if rank[i] <= bar then
      -- The seed and the slot, mixed by a square: a linear mix would let some slots win more often.
      local flight, slot = unpack_from(">i4I4", rows[i], 13)
      local mix = (seed * 40503 + slot * 2654435769) % 4294967291 % 67108859
      local key = { 0, fill[i], flight, mix * mix % 4294967291 }
      key[1] = unpack_from(">I4", rows[i], 47)
      if rank ~= cost then key[1], key[2] = 0, 0 end
      local at = 1
      while first and at < 4 and key[at] == first[at] do at = at + 1 end
      if not first or key[at] < first[at] then winner, first = i, key end
    end
  end
  return winner
end

-- How many of its confirmed blocks a worker holds without a gap.
local to_verify = VERIFY_BLOCKS
local function verify(slot, hashes, depth)
  local whole = 0
  while whole < depth and to_verify > 0 do
    local chunk = {}
    for block = whole + 1, min(whole + 512, depth) do chunk[block - whole] = sub(hashes, block * 8 - 7, block * 8) end
    for k, held in ipairs(call("SMISMEMBER", prefix .. "s:" .. format("%d", slot), unpack(chunk))) do
      if held == 0 then return whole + k - 1 end
    end
    whole, to_verify = whole + #chunk, to_verify - 512
  end
  if whole < depth then flagged = 1 end
  return whole
end

local w, slot, flags
for _ = 1, 3 do
  w = choose()
  slot, flags = unpack_from(">I4I2", rows[w], 17)
  local c, depth = chain_of[w], confirmed[w]
  if not depth or band(flags, CLOSED) ~= 0 then break end
  confirmed[w] = verify(slot, ARGV[c + 2], depth)
  if confirmed[w] == depth then break end
  if not speculated[w] then matched[w] = min(confirmed[w] * ARGV[c + 1], prompt) end
end
if dry then
  local answer = { "DRY", name[w] }
  for i = 1, count do
    local ahead = speculated[i] and min(speculated[i] * ARGV[chain_of[i] + 1], prompt) or 0
    answer[i + 2] = { name[i], matched[i] or 0, ahead, rows[i], format("%.6f", cost[i]) }
  end
  return answer
end

-- 5 book: the load, the lease, and the checkpoints that this request will make beyond what is confirmed. Block 1 always: it
-- tells whether anyone makes anything of a chain. The first write frees memory, which lets Redis take all of them when full.
call("ZREM", leases_key, id)
if turn then call("HINCRBY", counts_key, "round_robin", 1) end
local made, hashes, field = {}, ARGV[(chain_of[w] or #ARGV) + 2] or "", format("%d", slot)
local blocks = checkpoints(#hashes / 8)
for k = #blocks, 1, -1 do
  if blocks[k] == 1 or blocks[k] > confirmed[w] then
    made[#made + 1] = sub(hashes, blocks[k] * 8 - 7, blocks[k] * 8)
    local key = x .. made[#made]
    if call("HINCRBY", key, field, 1) == 1 then call("PEXPIRE", key, SPECULATION_MS) end
  end
end
local own, worker, epoch, prefill, decode, flight = matched[w] or 0, name[w], unpack_from(SUMS, rows[w])
local uncached = prompt - own
call("HSET", load_key, worker, struct.pack(SUMS, epoch, prefill + uncached, decode, flight + 1) .. sub(rows[w], 17))
local lease = struct.pack(LEASE, epoch, slot, uncached, decode_tokens, own, prompt, 0, #worker)
call("HSET", lease_key, id, lease .. worker .. table.concat(made))
call("ZADD", leases_key, now + lease_ms, id)
return { "BOOKED", worker, own, speculated[w] and 1 or 0, flagged, format("%.6f", cost[w]), url_of(worker, flags), wait_of(w),
  prompt, uncached, decode_tokens, flags }
