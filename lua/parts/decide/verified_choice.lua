--[[
decide/verified_choice: the choice, made again while its winner holds less than it seemed to.

Guarantee: only reads; the match of a winner that is not prefix-closed is what its reverse set (s:) holds without a gap,
at most 2048 blocks in all, else a lower bound and flagged = 1; chosen again at most twice.
Takes the state, the key prefix and the choice. Returns the candidate, why, and the match that the choice saw of it.
--]]
local call, unpack_from, sub, min, format = redis.call, struct.unpack, string.sub, math.min, string.format
local band, VERIFY_BLOCKS, CLOSED, PARTIAL = bit.band, 2048, 32, 64

return function(s, prefix, choose)
  local to_verify, matched = VERIFY_BLOCKS, s.matched

  -- How many of its confirmed blocks a worker holds without a gap.
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
    s.flagged = whole < depth and 1 or s.flagged
    return whole
  end

  local w, why, saw
  for _ = 1, 3 do
    w, why = choose(s)
    local slot, flags, scheme = unpack_from(">I4I2I4", s.rows[w], 17)
    local c, depth = s.chain_of[scheme], s.confirmed[w]
    saw = matched[w] or 0
    if not depth or band(flags, CLOSED + PARTIAL) == CLOSED then break end
    s.confirmed[w] = verify(slot, ARGV[c + 2], depth)
    if s.confirmed[w] == depth then break end
    if not s.speculated[w] then matched[w] = min(s.confirmed[w] * ARGV[c + 1], s.prompt) end
  end
  return w, why, saw
end
