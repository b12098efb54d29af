--[[
settle/mirror: updates the mirror, Redis' guess of the cache of an engine without the plugin, when it served a prompt.

Such an engine does not report its blocks, so the mirror has the blocks of the prompts that the engine was sent. The
mirror evicts the blocks that were used longest ago and, of one prompt, the last first, as engines do. It is a tree: a
node is a block at which prompts part, or block 1, or a power of two from 16 on, with the blocks between it and the next
node, whose hashes are the node's trail (field slot= of x:). All blocks of a node were used last by the same request: a
request that uses only some of them splits the node. So a node was never used later than the node before it.

If the engine's answer said that it lacked a block that the mirror has, the engine has evicted all blocks that were used
before that block, too. `lru:` (nodes by time of last use) then gets a member OUTDATED right behind that block's node,
and all nodes up to OUTDATED are evicted, at most MIRROR_EVICTIONS at a time.

Guarantee: no more than `capacity` blocks stay, unless more than MIRROR_EVICTIONS nodes would have to be evicted at
once: the rest is evicted with the next prompts, and no block is added beyond twice the capacity.
Takes the key prefix, the reservation's id, and a table: slot, blocks (number in the mirror), capacity, now_us, lacks
(the first block of the prompt that the engine lacked; nil: none), asked_us (earliest time when it got the prompt).
Returns the number of blocks in the mirror, and the number that were evicted because the mirror was full.
--]]
local call, sub, min, format = redis.call, string.sub, math.min, string.format
local OUTDATED = "outdated up to here" -- a member of lru:<slot> that is no hash
local FIRST_POWER, MAX_NODES, MIRROR_EVICTIONS = 16, 64, 128
local function exact(number) return format("%.0f", number) end

return function(prefix, id, worker)
  local slot, blocks, capacity, full = format("%d", worker.slot), worker.blocks, worker.capacity, 0
  local lru, trail_of = prefix .. "lru:" .. slot, slot .. MARK_TRAIL
  local chain = call("GET", prefix .. "c:" .. slot .. ":" .. id) or ""
  local last = #chain / 8
  local function hash_at(block) return sub(chain, block * 8 - 7, block * 8) end
  local function key_of(hash) return prefix .. "x:" .. hash end

  -- Return the bytes of the common beginning of two runs of hashes, by bisection: a hash depends on all before it.
  local function common(a, b)
    local low, high = 0, min(#a, #b) / 8
    if sub(a, 1, high * 8) == sub(b, 1, high * 8) then return high * 8 end
    while low < high do
      local middle = math.ceil((low + high) / 2)
      if sub(a, middle * 8 - 7, middle * 8) == sub(b, middle * 8 - 7, middle * 8) then
        low = middle
      else
        high = middle - 1
      end
    end
    return low * 8
  end

  local function make(hash, trail, score)
    local key = key_of(hash)
    call("HINCRBY", key, slot, 1)
    call("HSET", key, trail_of, trail)
    call("ZADD", lru, score, hash)
  end

  -- Return the score in lru: (the time of last use) of the node with this block; nil if the mirror lacks the block.
  local function used_us(block)
    local at = 1
    for _ = 1, MAX_NODES do
      local trail = call("HGET", key_of(hash_at(at)), trail_of)
      if not trail then return end
      local next_at = at + common(trail, sub(chain, at * 8 + 1)) / 8 + 1
      if block < next_at then return tonumber(call("ZSCORE", lru, hash_at(at)) or "") end
      at = next_at
    end
  end

  if worker.lacks then
    local used = used_us(worker.lacks)
    local mark = tonumber(call("ZSCORE", lru, OUTDATED) or "") or 0
    -- A block that was used after asked_us stays, because another request may have put it into the cache again.
    if used and used < worker.asked_us and used > mark then call("ZADD", lru, format("%.1f", used + 0.5), OUTDATED) end
  end

  -- Evict what was used longest ago: all nodes up to OUTDATED, then the blocks beyond the capacity.
  local function evict()
    local outdated = call("ZSCORE", lru, OUTDATED)
    for _ = 1, MIRROR_EVICTIONS do
      if not outdated and blocks <= capacity then return end
      local oldest = call("ZPOPMIN", lru)
      if not oldest[1] then return end
      local key, over = key_of(oldest[1]), blocks - capacity
      local held = 1 + call("HSTRLEN", key, trail_of) / 8
      if oldest[1] == OUTDATED then
        outdated = false
      elseif not outdated and over < held then
        call("HSET", key, trail_of, sub(call("HGET", key, trail_of), 1, (held - 1 - over) * 8))
        call("ZADD", lru, oldest[2], oldest[1])
        blocks, full = capacity, full + over
      else
        call("HDEL", key, trail_of)
        if call("HINCRBY", key, slot, -1) <= 0 then call("HDEL", key, slot, slot .. MARK_MAKER) end
        -- `blocks` may be too low, because replicas of before 2026-11-23 counted fewer.
        blocks, full = math.max(0, blocks - held), full + (outdated and 0 or held)
      end
    end
  end

  -- Note that every node of the prompt was used now; the deeper a node, the earlier its noted time (by 1 us each).
  local function note()
    local at, nodes, power = 1, 0, FIRST_POWER
    while at <= last and nodes < MAX_NODES do
      nodes = nodes + 1
      while power <= at do power = power * 2 end
      local hash, score, stop = hash_at(at), exact(worker.now_us - nodes), min(power, last + 1)
      local key, wanted = key_of(hash), sub(chain, at * 8 + 1, stop * 8 - 8)
      local kept = call("HGET", key, trail_of)
      if not kept then
        make(hash, wanted, score)
        blocks, at = blocks + 1 + #wanted / 8, stop
      else
        local same = common(kept, wanted)
        local on = at + same / 8 + 1 -- the block after the common ones
        if same < #kept then -- the rest of the node's trail was not used now
          make(sub(kept, same + 1, same + 8), sub(kept, same + 9), call("ZSCORE", lru, hash) or score)
          call("HSET", key, trail_of, sub(kept, 1, same))
        elseif same < #wanted and not call("HGET", key_of(hash_at(on)), trail_of) then
          call("HSET", key, trail_of, wanted)
          blocks, on = blocks + (#wanted - #kept) / 8, stop
        end
        call("ZADD", lru, score, hash)
        at = on
      end
    end
  end

  if blocks <= 2 * capacity then note() end
  evict()
  return blocks, full
end
