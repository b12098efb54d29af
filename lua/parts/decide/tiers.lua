--[[
decide/tiers: finds how much of the prompt each candidate can load from its tiers (shared/further_sets). An engine uses
what its GPU has of a prompt, then a tier that holds the blocks behind that.

Guarantee: only reads. What a GPU holds is found as exactly as without tiers, whatever tiers hold. Of a tier a lower
bound is found: it counts only if it holds the prompt's first block, too, and up to a gap, if it has any.
Takes the sets of all workers (packed: FURTHER_SET). Returns nil if none is a tier; else a table, the state's `tiers`:
  of_chain(key, by_slot): number of candidates and tiers that hold the first block (key), and a function from the key of
    a block to a number that takes the place of the size of its set: it counts candidates apart from tiers, because
    only a GPU's set is prefix-closed. by_slot: of the chain's scheme
  note(slot, block, tokens, by_slot): notes that this slot holds the chain up to a block, or these tokens; the deepest
    block comes first. Returns true if the slot is a tier's and was not noted before
  extend(matched): to be called when all chains are noted: adds what tiers hold to the matches. Before that, nothing
    below is set; a candidate is in these tables if its tiers hold a part of the prompt
  held        tokens that a candidate holds without its tiers; who changes this must call load(i)
  load(i)     computes matched of this candidate, and the three values below
  tokens      of the match, those that must be loaded; nil: none
  seconds     that this takes
  kind        number of the kind of the tier that reaches farthest
  whole(i, verify, hashes, block_tokens, prompt): cuts the candidate's tiers at their first gap behind what is held
    before them; returns whether there was none. verify: of decide/verified_choice
  seen        candidate, tokens and seconds as the last choice saw them (decide/verified_choice)
--]]
local call, unpack_from = redis.call, struct.unpack
local CANDIDATE = 65536 -- what a candidate adds to the number of a block; a tier adds 1
local SLOT, BLOCKS, TOKENS, SECONDS, KIND = 1, 2, 3, 4, 5 -- positions in the list of a tier

return function(sets)
  local of_slot, of = {}, {} -- tiers by slot; by candidate, the fastest first
  local tiers = { held = {}, tokens = {}, seconds = {}, kind = {} }
  for _, packed in ipairs(sets) do
    local slot, main, seconds, kind = unpack_from(FURTHER_SET, packed)
    if kind ~= KIND_OF_ENDS then
      of_slot[slot] = of_slot[slot] or {}
      table.insert(of_slot[slot], { main, seconds, kind })
    end
  end
  if not next(of_slot) then return nil end

  function tiers.of_chain(first, by_slot)
    local weights, holders = {}, 0 -- of the slots that hold the first block, as texts
    for _, slot in ipairs(call("SMEMBERS", first)) do
      local number = slot + 0
      local weight = by_slot[number] and CANDIDATE or of_slot[number] and 1
      if weight then weights[slot], holders = weight, holders + 1 end
    end
    return holders, function(key)
      local sum = 0
      for _, slot in ipairs(call("SMEMBERS", key)) do sum = sum + (weights[slot] or 0) end
      return sum
    end
  end

  function tiers.note(slot, block, tokens, by_slot)
    local users, found = of_slot[slot], false
    for k = 1, users and #users or 0 do
      local main, seconds, kind = unpack(users[k])
      local i = by_slot[main]
      if i then
        of[i], found = of[i] or {}, true
        table.insert(of[i], { slot, block, tokens, seconds, kind })
      end
    end
    if found then of_slot[slot] = nil end
    return found
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
      tiers.tokens[i], tiers.seconds[i], matched[i] = tokens > held and tokens - held or nil, seconds, tokens
    end

    for i, own in pairs(of) do
      table.sort(own, function(a, b) return a[SECONDS] < b[SECONDS] end)
      tiers.held[i] = matched[i] or 0
      tiers.load(i)
    end
  end

  function tiers.whole(i, verify, hashes, block_tokens, prompt)
    local from, whole = math.floor(tiers.held[i] / block_tokens), true
    for _, tier in ipairs(of[i]) do
      local blocks = tier[BLOCKS]
      if blocks > from then
        from = verify(tier[SLOT], hashes, blocks, from)
        if from < blocks then
          whole, tier[BLOCKS], tier[TOKENS] = false, from, math.min(from * block_tokens, prompt)
        end
      end
    end
    return whole
  end

  return tiers
end
