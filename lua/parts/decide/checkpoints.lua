--[[
decide/checkpoints: where open reservations count along a chain.

Guarantee: pure. A chain's checkpoints above a block, deepest first: the last block n, its fork (where it leaves a chain
that is being made already), powers of two down to 16, and 1. Returns them and the first that is not above the block.
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
