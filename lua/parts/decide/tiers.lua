--[[
decide/tiers: finds how much of the prompt each candidate can load from its tiers (shared/further_sets). An engine uses
what its GPU has of a prompt, then a tier that holds the blocks behind that.

Guarantee: only reads. What a GPU holds is found as exactly as without tiers, whatever tiers hold. Of a tier a lower
bound is found: it counts only if it holds the prompt's first block, too, and up to a gap, if it has any; but of the
candidate that is chosen all is found that it can load.
Takes the keys `sets` and `tiers` (by slot of a tier: TIER of each worker that reads it), the number of its tiers, and
whether the sets of all candidates are prefix-closed and count up to each of their blocks: then a tier counts only where
it holds more than the GPU. Returns nil if the fleet has no tier; else a table, the state's `tiers`:
  of_chain(key, by_slot): the number that takes the place of the size of the first block's set, of this key, and a
    function from the key of a block to its number: it counts tiers, and only those that hold the first block, apart
    from all others, because only a GPU's set is prefix-closed. by_slot: of the chain's scheme
  note(slots, block, size, prompt, by_slot, depth): notes that these slots, which are no candidates', hold the chain up
    to a block, if they are tiers; the deepest block comes first. size: tokens of a block. prompt: tokens of the prompt.
    depth: blocks that the candidates hold, as far as this is known by now. Returns how many of the slots were not noted
    before. The chain of an engine that computes its last cached block once more begins with the prompt's second block:
    a tier that has also the block before that (LOADS_DROPPED) gives one block more
  note_last(key, blocks, size, prompt, by_slot): notes the tiers that hold the block of this key, with which the prompt
    ends, behind a chain of so many blocks. An engine whose GPU, or tiers before that, hold all of the prompt up to this
    block loads it, too, although it computes the last token once more. A GPU's own last block is never used for that
  extend(matched): to be called when all chains are noted: adds what tiers hold to the matches. Before that, nothing
    below is set; a candidate is in these tables if its tiers hold a part of the prompt
  held        tokens that a candidate holds without its tiers; who changes this must call load(i)
  load(i)     computes matched of this candidate, and the three values below
  tokens      of the match, those that must be loaded; nil: none
  seconds     that this takes
  kind        number of the kind of the tier that reaches farthest
  whole(i, verify, hashes, block_tokens, prompt): cuts the candidate's tiers at their first gap behind what is held
    before them; returns whether there was none. verify: of decide/verified_choice
  beyond(i, matched, worker, verify, hashes, block_tokens, prompt): looks in the tiers of this candidate, whose id is
    `worker`, for blocks that follow what it holds: also in one that lacks the prompt's first block, as may be once the
    GPU has served that for long. For the candidate that is chosen, because it takes two calls
  seen        candidate, tokens and seconds as the last choice saw them (decide/verified_choice)
--]]
local call, unpack_from, min, max = redis.call, struct.unpack, math.min, math.max
local CANDIDATE = 65536 -- what a candidate adds to the number of a block; a tier adds 1
local FEW = 16 -- most tiers in the fleet for which each is asked for, at each block that is looked at
local SLOT, BLOCKS, TOKENS, SECONDS, KIND, MORE = 1, 2, 3, 4, 5, 6 -- positions in the list of a tier

return function(sets_key, tiers_key, count, all_closed)
  if count == 0 then return nil end
  local of, seen = {}, {} -- tiers by candidate, the fastest first; slots (as texts) that were noted for this chain
  local last = {} -- by candidate: the fastest tier that holds the last block: from and to which token, seconds, kind
  local tiers = { held = {}, tokens = {}, seconds = {}, kind = {} }
  local few, users = count <= FEW and {}, {} -- slots of all tiers, if they are few; users by slot
  local all = few and call("HGETALL", tiers_key) or {}
  for k = 1, #all, 2 do
    few[#few + 1], users[all[k]] = all[k], all[k + 1]
  end

  -- A block's set has few tiers: ask for each of them, and count the others.
  local function by_asking(first)
    local own = call("SMISMEMBER", first, unpack(few))
    local function number(key)
      local candidates, held = call("SCARD", key), 0
      local holds = candidates > 0 and call("SMISMEMBER", key, unpack(few))
      for k = 1, holds and #few or 0 do
        if holds[k] == 1 then candidates, held = candidates - 1, held + own[k] end
      end
      return candidates * CANDIDATE + held
    end
    return number(first), number
  end

  local function by_reading(first, by_slot)
    local weights, total = {}, 0 -- of the slots that hold the first block, as texts
    for _, slot in ipairs(call("SMEMBERS", first)) do
      local weight = by_slot[slot + 0] and CANDIDATE or 1
      weights[slot], total = weight, total + weight
    end
    return total, function(key)
      local sum = 0
      for _, slot in ipairs(call("SMEMBERS", key)) do sum = sum + (weights[slot] or 0) end
      return sum
    end
  end

  function tiers.of_chain(first, by_slot)
    seen = {}
    if few then return by_asking(first) end
    return by_reading(first, by_slot)
  end

  -- Call visit(candidate, seconds, kind, blocks that it gives beyond the chain's, whether it loads a prompt's last
  -- block) for each candidate that reads a tier.
  local function each_reader(packed, by_slot, visit)
    local at = 1
    while packed and at <= #packed do
      local main, seconds, kind, _
      main, seconds, kind, _, at = unpack_from(TIER, packed, at)
      local i, loads_last, dropped = by_slot[main], kind >= LOADS_LAST, kind % LOADS_LAST >= LOADS_DROPPED
      if i then visit(i, seconds, kind % LOADS_DROPPED, dropped and 1 or 0, loads_last) end
    end
  end

  function tiers.note(slots, block, size, prompt, by_slot, depth)
    local new = {}
    for _, slot in ipairs(slots) do
      if not seen[slot] then
        seen[slot], new[#new + 1] = true, slot
      end
    end
    local found = few and users or new[1] and call("HMGET", tiers_key, unpack(new)) or {}
    for k, slot in ipairs(new) do
      each_reader(found[few and slot or k], by_slot, function(i, seconds, kind, more)
        if all_closed and depth[i] and more == 0 then return end
        of[i] = of[i] or {}
        table.insert(of[i], { slot + 0, block, min((block + more) * size, prompt), seconds, kind, more })
      end)
    end
    return #new
  end

  function tiers.note_last(key, blocks, size, prompt, by_slot)
    local slots = few or call("SMEMBERS", key)
    if not slots[1] then return end
    local holds, readers = few and call("SMISMEMBER", key, unpack(few)), few or call("HMGET", tiers_key, unpack(slots))
    for k, slot in ipairs(slots) do
      local packed = few and holds[k] == 1 and users[slot] or not few and readers[k]
      each_reader(packed, by_slot, function(i, seconds, kind, more, loads_last)
        if loads_last and not (last[i] and last[i].seconds <= seconds) then
          local from = blocks > 0 and (blocks + more) * size or 0
          local to = min((blocks + more + 1) * size, prompt)
          last[i] = { from = from, to = to, seconds = seconds, kind = kind }
        end
      end)
    end
  end

  function tiers.extend(matched)
    function tiers.load(i)
      local held, tokens, seconds = tiers.held[i], tiers.held[i], 0
      for _, tier in ipairs(of[i]) do
        if tier[TOKENS] > tokens then
          seconds, tokens = seconds + (tier[TOKENS] - tokens) * tier[SECONDS], tier[TOKENS]
          tiers.kind[i] = tier[KIND]
        end
      end
      local behind = last[i]
      if behind and tokens == behind.from then
        seconds, tokens = seconds + (behind.to - tokens) * behind.seconds, behind.to
        tiers.kind[i] = behind.kind
      end
      tiers.tokens[i], tiers.seconds[i], matched[i] = tokens > held and tokens - held or nil, seconds, tokens
    end

    for i in pairs(last) do of[i] = of[i] or {} end
    for i, own in pairs(of) do
      if own[2] then table.sort(own, function(a, b) return a[SECONDS] < b[SECONDS] end) end
      tiers.held[i] = matched[i] or 0
      tiers.load(i)
    end
  end

  function tiers.whole(i, verify, hashes, block_tokens, prompt)
    local reach, whole = tiers.held[i], true
    for _, tier in ipairs(of[i]) do
      local blocks, more = tier[BLOCKS], tier[MORE]
      local begin = max(0, math.floor(reach / block_tokens) - more)
      local block = blocks > begin and verify(tier[SLOT], hashes, blocks, begin) or blocks
      if block < blocks then
        local tokens = block > begin and min((block + more) * block_tokens, prompt) or 0
        whole, tier[BLOCKS], tier[TOKENS] = false, block, tokens
      end
      reach = max(reach, tier[TOKENS])
    end
    return whole
  end

  function tiers.beyond(i, matched, worker, verify, hashes, block_tokens, prompt)
    local of_worker, new = call("HMGET", sets_key, worker .. ":cpu", worker .. ":disk"), {}
    local reach = matched[i] or 0
    for k = 1, 2 do
      if of_worker[k] then
        local slot, _, seconds, kind = unpack_from(FURTHER_SET, of_worker[k])
        local more = kind % LOADS_LAST >= LOADS_DROPPED and 1 or 0
        local from, all_blocks = math.floor(reach / block_tokens) - more, #hashes / 8
        local block = from >= 0 and verify(slot, hashes, min(from + 1, all_blocks), from) or 0 -- often it has nothing
        if block > from then block = verify(slot, hashes, all_blocks, block) end
        if block > from and block > 0 then
          reach = min((block + more) * block_tokens, prompt)
          new[#new + 1] = { slot, block, reach, seconds, kind % LOADS_DROPPED, more }
        end
      end
    end
    if not new[1] then return end
    tiers.held[i], of[i] = tiers.held[i] or matched[i] or 0, of[i] or {}
    for _, tier in ipairs(new) do table.insert(of[i], tier) end
    tiers.load(i)
  end

  return tiers
end
