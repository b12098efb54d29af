--[[
decide/verified_choice: chooses a candidate, and chooses again if it holds less of the prompt than its match says.

A match is found by bisection, which is exact only while a worker's set of blocks is prefix-closed (has each block's
predecessors). If a chosen worker's set is not, its reverse set (s:) tells how many blocks it holds without a gap, of at
most 2048 blocks; beyond these the match is a lower bound and s.flagged is 1. The choice is repeated twice at most.

So it is with the tiers of a chosen worker (decide/tiers), from the end of what its GPU holds. Then they are asked for
what follows. And so it is with the partner of a chosen worker (decide/joint).

Guarantee: only reads. Takes the state, the key prefix and the choosing function (decide/cost_rule). Shortens s.matched
and s.confirmed if blocks are missing; prolongs s.matched by what tiers add. Returns the candidate, one word why, and
its match as the choice saw it; the part of the match that it must load, as the choice saw that, is s.tiers.seen.
--]]
local call, unpack_from, sub, format = redis.call, struct.unpack, string.sub, string.format
local min, band = math.min, bit.band
local VERIFY_BLOCKS, CHUNK_BLOCKS, MAX_CHOICES = 2048, 512, 3

return function(s, prefix, choose)
  local to_verify, matched = VERIFY_BLOCKS, s.matched

  -- Count the blocks up to which a slot holds the chain without a gap, beginning behind the block `whole`.
  local function verify(slot, hashes, depth, whole)
    while whole < depth and to_verify > 0 do
      local chunk = {}
      for block = whole + 1, min(whole + CHUNK_BLOCKS, whole + to_verify, depth) do
        chunk[block - whole] = sub(hashes, block * 8 - 7, block * 8)
      end
      for k, held in ipairs(call("SMISMEMBER", prefix .. "s:" .. format("%d", slot), unpack(chunk))) do
        if held == 0 then return whole + k - 1 end
      end
      whole, to_verify = whole + #chunk, to_verify - #chunk
    end
    s.flagged = whole < depth and 1 or s.flagged
    return whole
  end

  -- Cut the match of a candidate at its first gap, if its sets may have any; return whether there was none.
  local function is_whole(w)
    local slot, flags, scheme = unpack_from(ROW_SLOT_TO_SCHEME, s.rows[w], SLOT_AT)
    local c, depth = s.chain_of[scheme], s.confirmed[w]
    local tiers = s.tiers and s.tiers.held[w] and c and s.tiers -- without a chain it has but the prompt's last block
    local whole = not depth or band(flags, FLAG_CLOSED + FLAG_PARTIAL) == FLAG_CLOSED
    if whole and not tiers then return true end
    if not whole then
      s.confirmed[w] = verify(slot, ARGV[c + 2], depth, 0)
      whole = s.confirmed[w] == depth
      if not whole and s.last_end then s.confirmed[w] = s.last_end(slot, ARGV[c + 2], s.confirmed[w]) end
      if not whole and not s.speculated[w] then
        matched[w] = min(s.confirmed[w] * ARGV[c + 1], s.prompt)
        if tiers then tiers.held[w] = matched[w] end
      end
    end
    if tiers then whole = tiers.whole(w, verify, ARGV[c + 2], ARGV[c + 1], s.prompt) and whole end
    if tiers and not whole then tiers.load(w) end
    return whole
  end

  local w, why, match_seen, chain
  for _ = 1, MAX_CHOICES do
    w, why = choose(s)
    match_seen = matched[w] or 0
    local tiers, partner = s.tiers, s.partner and s.partner[w]
    if tiers then tiers.seen = { candidate = w, tokens = tiers.tokens[w], seconds = tiers.seconds[w] } end
    local whole = is_whole(w)
    if partner then whole = is_whole(partner) and whole end
    if whole then break end
  end
  if s.tiers then chain = s.chain_of[unpack_from(ROW_SCHEME, s.rows[w], SCHEME_AT)] end
  if s.tiers and chain and matched[w] and not s.speculated[w] then
    s.tiers.beyond(w, matched, sub(s.rows[w], WORKER_ID_AT), verify, ARGV[chain + 2], ARGV[chain + 1], s.prompt)
  end
  return w, why, match_seen
end
