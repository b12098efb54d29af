--[[
apply/block_events: the operations `stored`, `removed` and `chunk`, which change the block sets of a worker's slots and
the digests of these sets.

Takes the state of apply (reads prefix, worker, record, row, live, shadow, changed, short and probed; adds to `blocks`,
sets `seen`), the table of operations, to which it adds three, and two functions: count(counter), which increments a
counter, and lost(cause), which also asks for a snapshot. Returns two functions for further sets of blocks:
  change(verb, sign, data, first, slot, digest, forward, mark): see below
  room(digest, most): tells whether a set of this digest may get further blocks; most: bound of its size (nil: main set)
--]]
local call = redis.call
local ALWAYS_BLOCKS = 524288 -- blocks that any worker may claim (8 million tokens); room() allows twice as many, 136 MB
local CHUNK_HASHES_AT = 9 -- position of the hashes in a chunk, behind the snapshot's id

return function(state, operation, count, lost)
  local block_prefix, held_prefix = state.prefix .. "b:", state.prefix .. "s:"
  local probe_key = state.prefix .. "probe:" .. state.worker
  local record, row, live, shadow, changed, short, probed =
    state.record, state.row, state.live, state.shadow, state.changed, state.short, state.probed

  -- Write (SADD, sign 1) or erase (SREM, sign -1) the packed hashes from position `first` of the data on. A hash that
  -- is in the set already, or already absent from it, does not change the digest. forward, mark: of a further set
  -- (shared/further_sets).
  local function change(verb, sign, data, first, slot, digest, forward, mark)
    local hashes, n, high, low = {}, 0, 0, 0
    local holders_prefix = forward and state.prefix .. forward or block_prefix
    slot = string.format("%d", slot) -- convert the number once, not at every call of SADD
    for at = first, #data, 8 do
      local hash = data:sub(at, at + 7)
      if call(verb, holders_prefix .. hash, slot) == 1 then
        local left, right = struct.unpack(HASH_HALVES, hash)
        n, high, low = n + 1, high + left, low + right
        hashes[n] = hash
      end
    end
    if n > 0 then call(verb, held_prefix .. slot .. (mark or ""), unpack(hashes)) end
    -- A probe awaits these blocks no more.
    if n > 0 and sign > 0 and probed and not forward then call("SREM", probe_key, unpack(hashes)) end
    digest[1], digest[2] = digest[1] + sign * n, (digest[2] + sign * high) % U32
    digest[3] = (digest[3] + sign * low) % U32
    state.blocks = state.blocks + (#data - first + 1) / 8
  end

  local function packed_hashes(bytes) return bytes >= 0 and bytes % 8 == 0 and bytes <= BATCH_BLOCKS * 8 end

  -- Tell whether a slot may get further blocks, so that no stream fills Redis. The bound is twice the capacity that the
  -- engine announced, because a batch may add blocks before it removes others. The row's capacity is cut to a multiple
  -- of the fleet's median, but a larger claim may be true: it counts up to ALWAYS_BLOCKS, or twice the row's capacity.
  local function room(digest, most)
    most = most or math.min(record.capacity_blocks, math.max(ALWAYS_BLOCKS, 2 * row[CAPACITY_BLOCKS_FIELD]))
    if not short and digest[1] + BATCH_BLOCKS <= 2 * most + 8 * BATCH_BLOCKS then return true end
    if short then row[FLAGS_FIELD], changed.row = bit.bor(row[FLAGS_FIELD], FLAG_PARTIAL), true end
    lost(short and "partial" or "overflow")
    return false
  end

  local function block_event(verb, sign, data)
    if not packed_hashes(#data) then return false end
    if record.shadow then -- plugins send no block events inside a snapshot, so this snapshot is wrong
      lost("interleaved")
    end
    if sign > 0 and not room(live) then return true end
    change(verb, sign, data, 1, row[SLOT_FIELD], live)
    changed.live = true
  end

  function operation.stored(data) return block_event("SADD", 1, data) end
  function operation.removed(data) return block_event("SREM", -1, data) end

  function operation.chunk(data, time)
    if not packed_hashes(#data - 8) then return false end
    state.seen = time -- heartbeats stand behind many chunks in the stream, so each chunk counts as one
    if not record.shadow or data:sub(1, 8) ~= record.snapshot then
      count("stale")
    elseif room(shadow) then
      change("SADD", 1, data, CHUNK_HASHES_AT, record.shadow, shadow)
      changed.shadow = true
    end
  end

  return change, room
end
