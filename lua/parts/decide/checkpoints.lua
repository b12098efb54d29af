--[[
decide/checkpoints: lists checkpoints, the blocks of a chain at which open reservations are counted (keys x:).

Guarantee: pure. The checkpoints of a chain, deepest first: its last block n, the fork, the powers of two down to 16,
and block 1. The fork is the block where this chain leaves a chain that a reservation is to compute already.
Takes n, `above` (only checkpoints beyond this block are wanted), and the fork or nil. Returns these checkpoints, and
the next checkpoint, which is not beyond `above` (0: there is none).
--]]
return function(n, above, fork)
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
