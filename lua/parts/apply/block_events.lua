--[[
apply/block_events: the operations stored, removed and chunk: what they do to the sets of a worker's slots and to its
digests.

Takes apply's view of the worker: the key prefix, its name, record, row, digests (live, shadow), what has changed, the
blocks read so far, when it was last heard, whether memory is short and whether it is being probed; count and lost.
--]]
local call = redis.call
local SLOT, FLAGS, CAPACITY, PARTIAL = 5, 6, 12, 64 -- of the row; a flag
local BATCH_BLOCKS, U32 = 128, 2 ^ 32

return function(of, operation, count, lost)
  local BLOCK, HELD, PROBE = of.prefix .. "b:", of.prefix .. "s:", of.prefix .. "probe:" .. of.worker
  local record, row, live, shadow, changed, short, probed =
    of.record, of.row, of.live, of.shadow, of.changed, of.short, of.probed

  -- Write (SADD, sign 1) or erase (SREM, sign -1) packed hashes from `first` on. Only a real change moves the digest.
  local function change(verb, sign, data, first, slot, digest)
    local hashes, n, high, low = {}, 0, 0, 0
    slot = string.format("%d", slot) -- once, not at every call
    for at = first, #data, 8 do
      local hash = data:sub(at, at + 7)
      if call(verb, BLOCK .. hash, slot) == 1 then
        local left, right = struct.unpack(">I4I4", hash)
        n, high, low = n + 1, high + left, low + right
        hashes[n] = hash
      end
    end
    if n > 0 then call(verb, HELD .. slot, unpack(hashes)) end
    if n > 0 and sign > 0 and probed then call("SREM", PROBE, unpack(hashes)) end -- told, though it may be evicted next
    digest[1], digest[2] = digest[1] + sign * n, (digest[2] + sign * high) % U32
    digest[3] = (digest[3] + sign * low) % U32
    of.blocks = of.blocks + (#data - first + 1) / 8
  end

  local function packed_hashes(bytes) return bytes >= 0 and bytes % 8 == 0 and bytes <= BATCH_BLOCKS * 8 end

  -- An honest engine never holds more than its capacity; twice that (a batch may add before it removes) is the bound.
  local function room(digest)
    if not short and digest[1] + BATCH_BLOCKS <= 2 * row[CAPACITY] + 8 * BATCH_BLOCKS then return true end
    if short then row[FLAGS], changed.row = bit.bor(row[FLAGS], PARTIAL), true end
    lost(short and "partial" or "overflow")
    return false
  end

  local function block_event(verb, sign, data)
    if not packed_hashes(#data) then return false end
    if record.shadow then -- a plugin sends these after `end`: what came so far is no longer one cut
      lost("interleaved")
    end
    if sign > 0 and not room(live) then return true end
    change(verb, sign, data, 1, row[SLOT], live)
    changed.live = true
  end

  function operation.stored(data) return block_event("SADD", 1, data) end
  function operation.removed(data) return block_event("SREM", -1, data) end

  function operation.chunk(data, time)
    if not packed_hashes(#data - 8) then return false end
    of.seen = time -- its heartbeats wait behind many of these
    if not record.shadow or data:sub(1, 8) ~= record.snapshot then
      count("stale")
    elseif room(shadow) then
      change("SADD", 1, data, 9, record.shadow, shadow)
      changed.shadow = true
    end
  end
end
