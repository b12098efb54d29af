--[[
decide: choose a worker for one request and book its load, in one step for the whole fleet.

Guarantee: as if decisions were made one after another; the same state and the same request give the same choice; a
known id gets its stored answer, one that ended before books nothing. dry = 1 books nothing and tells all rows.
How: the matched tokens of every worker, by bisection of the chain (exact while a worker's set is prefix-closed, else
the winner is verified and the choice made again, at most twice); blocks that open reservations will make (x: at the
checkpoints of a chain, the chains of leases between them) count as held. Then the predicted seconds to first token,
lowest wins:
  (wait + lambda*uncached + kappa*(tokens that another worker is making - own match) + pressure_price*overfill*prompt)
  / speed + decode_s_per_token * decode tokens; lambda is 1 while some worker waits for work, overfill = how much fuller
(0..1) its cache is than the mean. Costs within max(1 block, 2 % of the prompt, 5 ms) of the lowest are equal: then the
least evicting wins, then the least filled, the least in flight, a hash of the seed.

KEYS: alive load workers servers leases lease tick counts
ARGV: prefix, id, policy (cost, least_loaded, round_robin), prompt_tokens, decode_tokens, lease_ms, ttl_ms, max_probes,
      dry (0/1), exclude (ids joined by commas), seed (integer), lambda, kappa, pressure_price, decode_s_per_token,
      then for each of <= 4 chains: scheme id, block_tokens, packed 8-byte hashes (<= 8192)
Returns: {BOOKED or KNOWN, worker_id, matched_tokens, speculative 0/1, flagged 0/1, cost_s, url, wait_tokens,
      prompt_tokens, prefill_tokens booked, decode_tokens, flags}
      or {DRY, worker_id, {worker_id, matched_tokens, speculative_tokens, load row, cost_s}...}
Cost: O(workers + max_probes + checkpoints); at most 8 leases reaped
Keys that depend on data: b:<hash>, x:<hash>, s:<slot>, c:<slot>:<id>
--]]
local alive_key, load_key, workers_key, servers_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local leases_key, lease_key, tick_key, counts_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local prefix, id, policy, prompt, decode_tokens = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local lease_ms, ttl_ms, max_probes, dry = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9] == "1"
local exclude, seed, lambda, kappa = ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local pressure_price, decode_s = tonumber(ARGV[14]), tonumber(ARGV[15])

local SUMS, LEASE = ">I4i4i4i4", ">I4I4I4I4I4I4BB" -- SUMS: the head of a load row
local GRACE_GAP_MS, VERIFY_BLOCKS, STARTED, TOMBSTONE, APPROXIMATE, CLOSED = 1000, 2048, 1, 3, 16, 32
local PARTIAL = 64
local POLICIES = { cost = true, least_loaded = true, round_robin = true }
local call, unpack_from, sub, floor, band = redis.call, struct.unpack, string.sub, math.floor, bit.band
local max, min, format, b, x = math.max, math.min, string.format, prefix .. "b:", prefix .. "x:"

if id == "" or not POLICIES[policy] or not (prompt and decode_tokens and lease_ms and ttl_ms and max_probes and seed
    and lambda and kappa and pressure_price and decode_s) or #ARGV > 27
    or not (prompt >= 1 and prompt < 2147483648 and decode_tokens >= 0 and decode_tokens < 2147483648) then
  return redis.error_reply("BAD_ARGUMENT decide: an id, a policy it knows and ten numbers, at most four chains")
end

-- Cut out of the record, which may be long: its other fields concern nobody here.
local function url_of(worker, flags)
  local record = band(flags, APPROXIMATE) ~= 0 and call("HGET", workers_key, worker)
    or call("HGET", servers_key, worker:match("^(.*)%.") or "") or ""
  local _, before = record:find('"url":"', 1, true)
  return before and (record:match('^[^"]*', before + 1):gsub("\\/", "/")) or ""
end

local known = not dry and call("HGET", lease_key, id)
if known then
  local _, _, prefill, decode, own, tokens, stage, length, at = unpack_from(LEASE, known)
  if stage == TOMBSTONE then return redis.error_reply("CANCELLED " .. id .. " ended before it was booked") end
  local worker = sub(known, at, at + length - 1)
  local flags = unpack_from(">I2", call("HGET", load_key, worker) or ("\0"):rep(50), 21)
  return { "KNOWN", worker, own, 0, 0, "0", url_of(worker, flags), 0, tokens, prefill, decode, flags }
end
local time = call("TIME")
local now = time[1] * 1000 + floor(time[2] / 1000)

-- 1 reap: what expired gives back its load (unless its worker joined anew: another epoch) and its speculation
for _, gone in ipairs(call("ZRANGEBYSCORE", leases_key, "-inf", now, "LIMIT", 0, 8)) do
  local lease = call("HGET", lease_key, gone) or struct.pack(LEASE, 0, 0, 0, 0, 0, 0, TOMBSTONE, 0)
  call("ZREM", leases_key, gone)
  call("HDEL", lease_key, gone)
  local epoch, slot, prefill, decode, _, _, stage, length, at = unpack_from(LEASE, lease)
  call("UNLINK", prefix .. "c:" .. format("%d", slot) .. ":" .. gone)
  local worker = sub(lease, at, at + length - 1)
  local row = stage <= STARTED and call("HGET", load_key, worker)
  if row and unpack_from(">I4", row) == epoch then
    local _, p, d, n = unpack_from(SUMS, row)
    row = struct.pack(SUMS, epoch, p - prefill, d - (stage == STARTED and decode or 0), n - 1) .. sub(row, 17)
    call("HSET", load_key, worker, row)
  end
  for from = at + length, #lease, 8 do
    local key, field = x .. sub(lease, from, from + 7), format("%d", slot)
    if call("HINCRBY", key, field, -1) <= 0 then call("HDEL", key, field, field .. "+") end
  end
end

-- 2 the live, routable workers; nobody expires while the applier itself has been away
local ticked, grace_until, median = string.match(call("GET", tick_key) or "", "^(%d+) (%d+) (%d+)")
local grace = not ticked or now - ticked > GRACE_GAP_MS or now - ticked < 0 or now - grace_until < 0
local all, since, alive = call("HVALS", load_key), grace and "-inf" or now - ttl_ms, nil
if exclude ~= "" or call("ZCOUNT", alive_key, since, "+inf") < #all then -- reading all rows is half of by name
  alive = {}
  for _, worker in ipairs(call("ZRANGEBYSCORE", alive_key, since, "+inf")) do alive[worker] = true end
  for worker in exclude:gmatch("[^,]+") do alive[worker] = nil end
end
median = tonumber(median) or 0
if median == 0 then median = 10000 end
local slowest, fastest, count, least_wait, total_fill = median / 8, median * 8, 0, math.huge, 0
local place, wait, base_s, speed, fill, by_scheme, usable = {}, {}, {}, {}, {}, {}, {} -- place: of its row in `all`
for k = 1, #all do
  local prefill, decode, slot, flags, scheme, tps, foreign, foreign_decode, blocks, capacity =
    unpack_from(">i4i4xxxxI4I2I4I4I4I4I4I4", all[k], 5)
  -- SERVER and URL, not DRAINING, not HOSTILE; its blocks may be matched if PROVEN or APPROXIMATE
  local use = usable[flags]
  if not use then
    use = band(flags, 139) ~= 3 and "no" or band(flags, 20) ~= 0 and "match" or "load"
    usable[flags] = use
  end
  if use ~= "no" and #all[k] > 50 and (not alive or alive[sub(all[k], 51)]) then
    if tps < slowest then tps = tps == 0 and median or slowest elseif tps > fastest then tps = fastest end
    local ahead, share = prefill + foreign, capacity > 0 and blocks / capacity or 0
    count, total_fill = count + 1, total_fill + share
    if ahead < least_wait then least_wait = ahead end
    place[count], wait[count], speed[count], fill[count] = k, ahead, tps, share
    base_s[count] = ahead / tps + decode_s * (decode + foreign_decode)
    if use == "match" then
      local by_slot = by_scheme[scheme] or {}
      by_scheme[scheme], by_slot[slot] = by_slot, count
    end
  end
end
if count == 0 then return redis.error_reply("NO_WORKER none of " .. #all .. " workers is alive and routable") end

-- 3 match: blocks that are confirmed (b:), then blocks that open reservations will make (x:), then tokens
local flagged, slack, probes, confirmed, speculated, matched, chain_of = 0, 0.02 * prompt, max_probes, {}, {}, {}, {}
local counted, node, replace, hops = {}, {}, {}, 8 * max_probes -- who counts at block 1; the others: follow

-- A chain's checkpoints above a block, deepest first: the last block n, its fork, powers of two down to 16, and 1.
local function checkpoints(n, above, fork)
  local blocks, block, power = {}, n, 8192
  while block > above do
    if fork and fork >= block then
      blocks[#blocks + 1] = fork > block and fork or nil
      fork = nil
    end
    blocks[#blocks + 1] = block
    while power >= block do power = power / 2 end
    block = power >= 16 and power or block > 1 and 1 or 0
  end
  blocks[#blocks + 1] = fork
  return blocks, block
end

-- The blocks at which somebody's run ends, deepest first. Sets of holders are nested while workers are prefix-closed,
-- so nobody's run ends between two sets of one size. Every open interval is halved once a round, the widest first.
local function ends_of(hashes, n, holders)
  local low, low_size, high, high_size, ends, last, k = { 1 }, { holders }, { n + 1 }, { 0 }, {}, 1, 1
  while k <= last do
    local l, h, ls, hs = low[k], high[k], low_size[k], high_size[k]
    if ls ~= hs and (h - l == 1 or probes <= 0) then
      ends[#ends + 1], flagged = l, h - l > 1 and 1 or flagged
    elseif ls ~= hs then
      local middle = k == 1 and n or floor((l + h) / 2) -- a prompt that was seen whole is common
      local size = call("SCARD", b .. sub(hashes, middle * 8 - 7, middle * 8))
      probes = probes - 1
      if size ~= hs then
        last = last + 1
        low[last], low_size[last], high[last], high_size[last] = middle, size, h, hs
      end
      if size ~= ls then
        last = last + 1
        low[last], low_size[last], high[last], high_size[last] = l, ls, middle, size
      end
    end
    k = k + 1
  end
  table.sort(ends, function(p, q) return p > q end)
  ends[#ends + 1] = 1 -- a slot with holes (a shadow that fills) can hide an end: what is left has block 1 at least
  return ends
end

-- Give each of `wanted` workers the first of `blocks` that it holds: its depth.
local function deepest(blocks, wanted, by_slot, holders_of)
  local depth = {}
  for k = 1, #blocks do
    local holders = holders_of(blocks[k])
    for m = 1, #holders do
      local i = by_slot[tonumber(holders[m])]
      if i and not depth[i] then depth[i], wanted = blocks[k], wanted - 1 end
    end
    if wanted <= 0 then break end
  end
  return depth
end

-- Two chains part between checkpoints: where, tells the chain (c:) of the lease that made the checkpoint, or the trail
-- that the mirror of an approximate worker keeps; who parted there counts at the next block, so its chain is found too.
-- A hash stands for all before it, so one of them tells whether two chains are still one. Starts at `block`, asks for
-- blocks beyond `depth` only. Returns the last block that is known or being made, whether it is being made (not yet in
-- the mirror), the node where a longer chain belongs, and whether that node has a maker to be replaced.
local function follow(hashes, block, depth, slot)
  local n, whole, making, parted, takes, field = #hashes / 8, depth, false, nil, false, format("%d", slot)
  while hops > 0 do
    hops = hops - 1
    local makes, maker, trail = unpack(call("HMGET", x .. sub(hashes, block * 8 - 7, block * 8), field, field .. "+",
      field .. "="))
    if not makes then break end
    local chain = maker and prefix .. "c:" .. field .. ":" .. maker
    local length, kept = chain and call("STRLEN", chain) / 8 or 0, trail and block + #trail / 8 or 0
    local last, low = max(length, kept), max(block, min(whole, n))
    local high = min(last, n)
    local function same(at)
      hops = hops - 1
      local theirs = at <= kept and trail and sub(trail, (at - block) * 8 - 7, (at - block) * 8)
        or call("GETRANGE", chain, at * 8 - 8, at * 8 - 1)
      return theirs == sub(hashes, at * 8 - 7, at * 8)
    end
    if low < high and not same(low + 1) then high = low end
    while low < high and hops > 0 do
      local middle = floor((low + high + 1) / 2)
      if same(middle) then low = middle else high = middle - 1 end
    end
    if low > whole then whole, making = low, low > kept end
    -- A chain that ended here is lengthened where it begins, one that goes another way is left at the next block.
    parted, takes = whole >= last and block or whole + 1, whole >= last or maker and length == 0
    if whole >= n or whole < block then break end
    block = whole + 1
  end
  if parted and parted > n then parted = nil end
  flagged = hops <= 0 and 1 or flagged
  return whole, making, parted, takes
end

for c = 16, #ARGV, 3 do
  local scheme, size, hashes = tonumber(ARGV[c]), tonumber(ARGV[c + 1]), ARGV[c + 2] or "-"
  if not scheme or not size or size < 1 or #hashes % 8 ~= 0 or #hashes > 65536 then
    return redis.error_reply("BAD_ARGUMENT decide: malformed chain")
  end
  local by_slot, n, first, depth, lowest = by_scheme[scheme], #hashes / 8, sub(hashes, 1, 8), {}, nil
  slack = max(slack, size)
  if by_slot and n > 0 then
    chain_of[scheme] = c
    local holders, makers, wanted = call("SCARD", b .. first), call("HKEYS", x .. first), 0
    if holders > 0 then
      depth = deepest(ends_of(hashes, n, holders), holders, by_slot, function(block)
        if block == 1 then return call("SMEMBERS", b .. first) end
        return call("SINTER", b .. first, b .. sub(hashes, block * 8 - 7, block * 8))
      end)
    end
    for k = 1, #makers do
      local i = by_slot[tonumber(makers[k])]
      if i then lowest, counted[i], wanted = min(lowest or n, depth[i] or 0), true, wanted + 1 end
    end
    if lowest then
      local blocks, below = checkpoints(n, lowest)
      blocks[#blocks + 1] = below > 0 and below or nil
      local made = deepest(blocks, wanted, by_slot, function(block)
        return block == 1 and makers or call("HKEYS", x .. sub(hashes, block * 8 - 7, block * 8))
      end)
      for i, block in pairs(made) do
        local own, slot = depth[i] or 0, unpack_from(">I4", all[place[i]], 17)
        local whole, making, parted, takes = follow(hashes, block, own, slot)
        node[i], replace[i] = parted, takes
        if whole > own then matched[i], speculated[i] = min(whole * size, prompt), making and whole or nil end
      end
    end
    for i, block in pairs(depth) do
      confirmed[i], matched[i] = block, max(matched[i] or 0, min(block * size, prompt))
    end
  end
end

-- 4 choose: the lowest cost; what costs the same goes to the least pressed cache
local cost, turn = {}, {}
for i = 1, policy == "round_robin" and count or 0 do turn[i] = i end
table.sort(turn, function(p, q) return sub(all[place[p]], 51) < sub(all[place[q]], 51) end)
turn = turn[1] and turn[(call("HGET", counts_key, "round_robin") or 0) % count + 1]

local function before(p, q)
  for k = 1, 4 do
    if p[k] ~= q[k] then return p[k] < q[k] end
  end
end

local function choose()
  local making, lowest, tie, winner, first = 0, math.huge, 0, nil, nil
  for i in pairs(speculated) do making = max(making, matched[i]) end
  local mean_fill, price, each = total_fill / count, pressure_price * prompt, least_wait > 0 and lambda or 1
  for i = 1, count do
    local own, over = matched[i] or 0, fill[i] - mean_fill
    local tokens = each * (prompt - own)
    if own < making then tokens = tokens + kappa * (making - own) end
    if over > 0 then tokens = tokens + price * over end
    local seconds = base_s[i] + tokens / speed[i]
    cost[i] = seconds
    if seconds < lowest then lowest, tie = seconds, max(slack / speed[i], 0.005) end
  end
  local rank, bar = cost, lowest + tie
  if policy == "least_loaded" then rank, bar = wait, min(unpack(wait)) end
  for i = 1, count do
    if rank[i] <= bar then
      local flight, slot = unpack_from(">i4I4", all[place[i]], 13)
      -- The seed and the slot, mixed by a square: a linear mix would let some slots win more often.
      local mix = (seed * 40503 + slot * 2654435769) % 4294967291 % 67108859
      local key = { 0, 0, flight, mix * mix % 4294967291 }
      if rank == cost then key[1], key[2] = (unpack_from(">I4", all[place[i]], 47)), fill[i] end
      if not first or before(key, first) then winner, first = i, key end
    end
  end
  return turn or winner
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
  flagged = whole < depth and 1 or flagged
  return whole
end

local w, slot, flags, c
for _ = 1, 3 do
  w = choose()
  local scheme
  slot, flags, scheme = unpack_from(">I4I2I4", all[place[w]], 17)
  c = usable[flags] == "match" and chain_of[scheme]
  local depth = confirmed[w]
  if not depth or band(flags, CLOSED + PARTIAL) == CLOSED then break end
  confirmed[w] = verify(slot, ARGV[c + 2], depth)
  if confirmed[w] == depth then break end
  if not speculated[w] then matched[w] = min(confirmed[w] * ARGV[c + 1], prompt) end
end
local own, row = matched[w] or 0, all[place[w]]
local worker = sub(row, 51)
if dry then
  local answer = { "DRY", worker }
  for i = 1, count do
    local k, made = place[i], 0
    if speculated[i] then made = min(speculated[i] * ARGV[chain_of[unpack_from(">I4", all[k], 23)] + 1], prompt) end
    answer[i + 2] = { sub(all[k], 51), matched[i] or 0, made, all[k], format("%.6f", cost[i]) }
  end
  return answer
end

-- 5 book: load, lease, and the checkpoints that this request will make beyond what is confirmed; block 1 always: it
-- tells whether anyone makes anything of a chain. The first write frees memory: then a full Redis takes the rest too.
call("ZREM", leases_key, id)
if turn then call("HINCRBY", counts_key, "round_robin", 1) end
local made, hashes, field = {}, c and ARGV[c + 2] or "", format("%d", slot)
local blocks = checkpoints(#hashes / 8, confirmed[w] or 0, node[w])
if c and blocks[#blocks] ~= 1 then blocks[#blocks + 1] = 1 end
for k = #blocks, 1, -1 do
  local hash = sub(hashes, blocks[k] * 8 - 7, blocks[k] * 8)
  made[#made + 1] = hash
  if not counted[w] then
    call("HSET", x .. hash, field, 1, field .. "+", id)
  elseif call("HINCRBY", x .. hash, field, 1) == 1 or replace[w] and blocks[k] == node[w] then
    call("HSET", x .. hash, field .. "+", id)
  end
end
local epoch, prefill, decode, flight = unpack_from(SUMS, row)
local uncached = prompt - own
call("HSET", load_key, worker, struct.pack(SUMS, epoch, prefill + uncached, decode, flight + 1) .. sub(row, 17))
local lease = struct.pack(LEASE, epoch, slot, uncached, decode_tokens, own, prompt, 0, #worker)
call("HSET", lease_key, id, lease .. worker .. table.concat(made))
if c then call("SET", prefix .. "c:" .. field .. ":" .. id, hashes) end
call("ZADD", leases_key, now + lease_ms, id)
return { "BOOKED", worker, own, speculated[w] and 1 or 0, flagged, format("%.6f", cost[w]), url_of(worker, flags),
  wait[w], prompt, uncached, decode_tokens, flags }
