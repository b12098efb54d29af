--[[
decide/reserve: books a choice: the worker's load, the lease, and the checkpoints of blocks that are to be computed.

Guarantee: the first write frees memory; a Redis that is at its limit then takes the other writes, too. Checkpoints are
noted beyond the worker's confirmed blocks; at the next one before that, where a longer prompt with the same beginning
looks while these blocks are being reported; and always at block 1, which tells whether any part of a chain is to be
computed. Takes the state, the candidate, the keys of load, leases and lease, the key prefix, the reservation's id,
decode_tokens, and the time at which the lease expires (ms). Returns the booked tokens for prefill, and for decoding:
the whole context less the match, booked at once, because the engine will need that room in its cache. One token is
booked for prefill even if all are held, because the engine computes the last one once more. What must be loaded from a
tier (decide/tiers) is booked for prefill as the tokens that the engine computes in that time, at most as all of these
tokens, so that later decisions see the engine busy with it; but not for a reservation of several prompts, each of which
gives back what it lacks (apply/progress).
takes: the worker takes the prompt's blocks from another engine, so it computes nothing, and no checkpoints are noted:
until the blocks have come, nobody else could use them. What the lease says of its match is not compared.
--]]
local call, unpack_from, sub, format = redis.call, struct.unpack, string.sub, string.format
local max, min, floor = math.max, math.min, math.floor
local checkpoints = include "decide/checkpoints"

return function(s, w, load_key, leases_key, lease_key, prefix, id, decode_tokens, expires_ms, takes)
  local row, own, x = s.rows[w], s.matched[w] or 0, prefix .. "x:"
  local worker, slot, _, scheme = sub(row, WORKER_ID_AT), unpack_from(ROW_SLOT_TO_SCHEME, row, SLOT_AT)
  local c = not takes and not s.unmatchable[w] and s.chain_of[scheme]
  call("ZREM", leases_key, id)
  local made, hashes, field = {}, c and ARGV[c + 2] or "", format("%d", slot)
  local blocks, before = checkpoints(#hashes / 8, s.confirmed[w] or 0, c and s.node[w] or nil)
  if before > 1 and blocks[#blocks] ~= before then blocks[#blocks + 1] = before end
  if c and blocks[#blocks] ~= 1 then blocks[#blocks + 1] = 1 end
  for k = #blocks, 1, -1 do
    local hash = sub(hashes, blocks[k] * 8 - 7, blocks[k] * 8)
    made[#made + 1] = hash
    if not s.counted[w] then
      call("HSET", x .. hash, field, "1", field .. MARK_MAKER, id)
    elseif call("HINCRBY", x .. hash, field, "1") == 1 or s.replace[w] and blocks[k] == s.node[w] then
      call("HSET", x .. hash, field .. MARK_MAKER, id)
    end
  end
  local epoch, prefill, decode, flight = unpack_from(ROW_EPOCH_TO_IN_FLIGHT, row)
  local uncached, context = max(1, s.prompt - own), max(0, decode_tokens - own)
  local loads = s.tiers and s.tiers.tokens[w]
  if takes then
    own, uncached = own - (loads or 0), 0
    context = max(0, decode_tokens - own)
  elseif loads and sub(id, MARK_AT, MARK_AT) ~= MARK_SEVERAL_PROMPTS then
    uncached = uncached + floor(min(s.tiers.seconds[w] * s.speed[w], loads) + 0.5)
  end
  local work
  if prefill > 0 then
    work = sub(row, BUSY_SHARE_AT)
  else
    local share, evicted, _, since = unpack_from(ROW_BUSY_SHARE_TO_SINCE_MS, row, BUSY_SHARE_AT)
    local _, now_share = (include "shared/busy_share")(share, false, since, s.now)
    work = struct.pack(ROW_BUSY_SHARE_TO_SINCE_MS, now_share, evicted, uncached, s.now % U32)
      .. sub(row, AFTER_SINCE_MS)
  end
  local head = struct.pack(ROW_EPOCH_TO_IN_FLIGHT, epoch, prefill + uncached, decode + context, flight + 1)
  call("HSET", load_key, worker, head .. sub(row, AFTER_IN_FLIGHT, BUSY_SHARE_AT - 1) .. work)
  local matched = takes and own + JUDGED or own
  local lease = struct.pack(LEASE, epoch, slot, uncached, context, matched, s.prompt, STAGE_BOOKED, #worker)
  call("HSET", lease_key, id, lease .. worker .. table.concat(made))
  if c then call("SET", prefix .. "c:" .. field .. ":" .. id, hashes) end
  call("ZADD", leases_key, format("%d", expires_ms), id)
  return uncached, context
end
