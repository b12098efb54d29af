--[[
decide/prefix_match: finds how many tokens of the prompt each candidate holds, or will hold once reservations that are
open now are computed, and adds them to the state of shared/candidates.

For each chain it looks first for confirmed blocks (b:<hash>: the slots that hold a block), then for blocks that open
reservations will make (x:<hash> at checkpoints, between them the chains c: of the leases), and converts both to tokens.

Guarantee: only reads. Exact while each worker's set of blocks is prefix-closed. At most max_probes calls for confirmed
blocks and 8 times as many for chains; beyond that a match is a lower bound and s.flagged is 1.
Takes the state, the key prefix, two arguments of decide (ending, prompt_tokens), max_probes, the position of the first
chain in ARGV, the key of the leases' records, and the keys `sets` and `tiers`. Returns an error reply, or nil. If a
candidate has tiers, decide/tiers adds what can be loaded from them; decide/groups cuts the matches of hybrid workers.
Adds to the state, by candidate:
  matched (tokens), confirmed (blocks), speculated (blocks; only if some blocks of the match are still to be computed)
  counted (true if a reservation, or a guess of an approximate worker's cache, has the same block 1 there)
  node (the block where this chain leaves a chain that is to be computed there), replace (whether x: of that block is
  to name this request's reservation as its maker)
and for all: chain_of (scheme -> position in ARGV), block (tokens of the largest blocks), flagged.
--]]
local call, sub, floor = redis.call, string.sub, math.floor
local max, min, format, tonumber = math.max, math.min, string.format, tonumber
local HOPS_PER_PROBE, MAX_CHAIN_BYTES, NO_BLOCK = 8, 65536, ("\0"):rep(8)
local checkpoints = include "decide/checkpoints"

return function(s, prefix, ending, prompt, max_probes, first_chain, lease_key, sets_key, tiers_key)
  local b, x = prefix .. "b:", prefix .. "x:"
  local matched, confirmed, speculated, counted, node, replace = {}, {}, {}, {}, {}, {} -- by candidate
  local chain_of, largest, flagged = {}, 1, 0
  local tier_count = s.has_sets and call("HLEN", tiers_key)
  local groups = tier_count and (include "decide/groups")(prefix, sets_key, tier_count)
  local tiers = tier_count and (include "decide/tiers")(sets_key, tiers_key, tier_count, not groups and not s.has_open)
  local probes, hops = max_probes, HOPS_PER_PROBE * max_probes -- calls left for confirmed blocks, chains

  -- Find the blocks that may be the last that some worker holds of the chain, deepest first. The deeper a block, the
  -- fewer workers hold it, so no worker's run ends between two blocks whose sets (b:) have one size. In each round
  -- every interval with different sizes at its ends is halved once, so all are equally wide when no call is left.
  -- size_of: a function of a block in place of the size of its set (decide/tiers); nil: the size.
  local function ends_of(hashes, n, holders, size_of)
    local low, low_size, high, high_size = { 1 }, { holders }, { n + 1 }, { 0 } -- of each interval: blocks, holders
    local ends, halved, first = {}, true, n -- often the whole prompt is cached: look there first
    while halved do
      halved = false
      for k = 1, #low do
        local l, h, ls, hs = low[k], high[k], low_size[k], high_size[k]
        if ls ~= hs and (h - l == 1 or probes <= 0) then
          flagged, low_size[k] = h - l > 1 and 1 or flagged, hs
          local place = #ends + 1
          while place > 1 and ends[place - 1] < l do
            ends[place], place = ends[place - 1], place - 1
          end
          ends[place] = l
        elseif ls ~= hs then
          local middle = first or floor((l + h) / 2)
          local key = b .. sub(hashes, middle * 8 - 7, middle * 8)
          local size = size_of and size_of(key) or call("SCARD", key)
          first, halved, probes = nil, true, probes - 1
          if size == hs then
            high[k] = middle
          else
            low[k], low_size[k] = middle, size
            if size ~= ls then
              local last = #low + 1
              low[last], low_size[last], high[last], high_size[last] = l, ls, middle, size
            end
          end
        end
      end
    end
    ends[#ends + 1] = 1 -- gaps in a slot's set (a snapshot under way) can hide an end
    return ends
  end

  -- Tell whether a maker's chain of so many tokens ends with the last whole block of its prompt. If the prompt has no
  -- tokens behind that, versions of vLLM keep its states at different places.
  local function leaves_end(maker, tokens, size)
    local lease = call("HGET", lease_key, maker)
    if not lease then return false end
    local _, _, _, _, _, prompt_tokens = struct.unpack(LEASE, lease)
    return prompt_tokens > tokens and prompt_tokens < tokens + size
  end

  -- Find the last block up to which a chain that is to be computed on candidate i equals the chain of this request,
  -- which may lie between checkpoints: then it is found in the chain (c:) of the lease that made the checkpoint, or in
  -- the trail that the mirror of an approximate worker has there. A third chain that leaves at the same block is noted
  -- at the next block, so it is followed, too. A hash depends on all blocks before it, so one comparison tells whether
  -- two chains are equal up to a block. Starts at `block`; blocks up to `depth` are known. A hybrid worker that keeps
  -- ends sparsely will have them where makers' prompts end: only these count. Returns
  --   that last block, and whether it is still to be computed (an approximate worker reports no blocks: there a maker's
  --   first token shows that they are computed, though the mirror gets them only at the end of the request),
  --   the block at which a longer chain is to be noted (node), and whether to replace the maker that is noted there.
  local function follow(hashes, size, block, depth, i)
    local n, field = #hashes / 8, format("%d", s.slots[i])
    local whole, making, parted, takes = depth, false, nil, false -- the values to return, in order
    local approximate = bit.band(struct.unpack(ROW_FLAGS, s.rows[i], FLAGS_AT), FLAG_APPROXIMATE) ~= 0
    local function made_by(maker)
      return approximate and maker and (call("HGET", lease_key, maker) or ""):byte(LEASE_STAGE_AT) == STAGE_STARTED
    end
    local sparse, promised = groups and groups.sparse(s.slots[i]), depth
    while hops > 0 do
      hops = hops - 1
      local makes, maker, trail = unpack(call("HMGET", x .. sub(hashes, block * 8 - 7, block * 8), field,
        field .. MARK_MAKER, field .. MARK_TRAIL))
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
      if low > whole then whole, making = low, low > kept and not made_by(maker) end
      if sparse and low == length and low > promised and leaves_end(maker, length * size, size) then promised = low end
      -- A longer chain is noted in place of one that ends here, a chain that goes another way at the next block.
      parted, takes = whole >= last and block or whole + 1, whole >= last or maker and length == 0
      if whole >= n or whole < block then break end
      block = whole + 1
    end
    if parted and parted > n then parted = nil end
    flagged = hops <= 0 and 1 or flagged
    if sparse and promised < whole then whole, making = promised, promised > depth end
    return whole, making, parted, takes
  end

  for c = first_chain, #ARGV, 3 do
    local scheme, size, hashes = tonumber(ARGV[c]), tonumber(ARGV[c + 1]), ARGV[c + 2] or "-"
    if not scheme or not size or size < 1 or #hashes % 8 ~= 0 or #hashes > MAX_CHAIN_BYTES or chain_of[scheme] then
      return redis.error_reply("BAD_ARGUMENT decide: malformed chain")
    end
    local n, first, depth, lowest = #hashes / 8, sub(hashes, 1, 8), {}, nil
    largest = max(largest, size)
    if n > 0 then
      chain_of[scheme] = c
      local holders, makers, wanted = call("SCARD", b .. first), call("HKEYS", x .. first), 0
      local by_slot = s.by_slot[scheme] or {}
      local function key(of, block) return of .. sub(hashes, block * 8 - 7, block * 8) end
      local total, size_of = holders, nil
      if tiers and holders > 0 then total, size_of = tiers.of_chain(b .. first, by_slot) end
      local ends = holders > 0 and ends_of(hashes, n, total, size_of) or {}
      for k = 1, #ends do -- the deepest end that a candidate holds is its depth
        local block = ends[k]
        local slots = block == 1 and call("SMEMBERS", b .. first) or call("SINTER", b .. first, key(b, block))
        local tokens, others = min(block * size, prompt), tiers and {}
        for m = 1, #slots do
          local i = by_slot[slots[m] + 0]
          if i and not depth[i] then
            depth[i], matched[i], holders = block, tokens, holders - 1
          elseif not i and others then
            others[#others + 1] = slots[m]
          end
        end
        if others then holders = holders - tiers.note(others, block, size, prompt, by_slot, depth) end
        if holders <= 0 then break end
      end
      if groups then
        groups.cut(s.slots, hashes, depth)
        for i in pairs(matched) do
          if by_slot[s.slots[i]] == i then matched[i] = depth[i] and min(depth[i] * size, prompt) end
        end
      end
      if not next(confirmed) then
        confirmed = depth
      else
        for i, block in pairs(depth) do confirmed[i] = block end
      end
      local names, which = {}, {} -- of the candidates that are to compute some of the chain: field of x:, candidate
      for k = 1, #makers do
        local i = by_slot[tonumber(makers[k])]
        if i then
          wanted = wanted + 1
          lowest, counted[i], names[wanted], which[wanted] = min(lowest or n, depth[i] or 0), true, makers[k], i
        end
      end
      if lowest then
        local blocks, below = checkpoints(n, lowest)
        local keys, made = {}, {}
        for k = 1, #blocks do keys[k] = key(x, blocks[k]) end
        if keys[2] and call("EXISTS", unpack(keys)) == 0 then blocks = {} end -- often none of them is to be computed
        blocks[#blocks + 1] = below > 0 and below or nil
        for k = 1, #blocks do
          local block = blocks[k]
          local makes = block == 1 and names or call("HMGET", key(x, block), unpack(names))
          for m = 1, #names do
            local i = which[m]
            if makes[m] and not made[i] then made[i], wanted = block, wanted - 1 end
          end
          if wanted <= 0 then break end
        end
        for i, block in pairs(made) do
          local own = depth[i] or 0
          local whole, making, parted, takes = follow(hashes, size, block, own, i)
          node[i], replace[i] = parted, takes
          if whole > own then matched[i], speculated[i] = min(whole * size, prompt), making and whole or nil end
        end
      end
    end
    local at = (c - first_chain) / 3 * 8
    local hash = tiers and sub(ending, at + 1, at + 8) or ""
    if hash ~= "" and hash ~= NO_BLOCK then
      tiers.note_last(b .. hash, n, size, prompt, s.by_slot[scheme] or {})
    end
  end
  s.flagged, s.block, s.matched, s.speculated, s.confirmed = flagged, largest, matched, speculated, confirmed
  s.chain_of, s.counted, s.node, s.replace = chain_of, counted, node, replace
  if groups then s.last_end, s.flagged = groups.last_end, max(flagged, groups.short) end
  if tiers then
    s.tiers = tiers
    tiers.extend(matched)
  end
end
