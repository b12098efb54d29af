--[[
decide/reserve: a choice becomes a reservation: load, lease, and the checkpoints that this request will make beyond
what is
confirmed; block 1 always: it tells whether anyone makes anything of a chain.

Guarantee: the first write frees memory: then a full Redis takes the rest too. Takes the state, the candidate, the keys
of load, leases and lease, the key prefix, the reservation's id, decode_tokens and when the lease expires (ms).
Returns the prefill tokens that are booked.
--]]
local call, unpack_from, sub, format = redis.call, struct.unpack, string.sub, string.format
local SUMS, LEASE = ">I4i4i4i4", ">I4I4I4I4I4I4BB" -- SUMS: the head of a load row
local checkpoints = include "decide/checkpoints"

return function(s, w, load_key, leases_key, lease_key, prefix, id, decode_tokens, expires_ms)
  local row, own, x = s.rows[w], s.matched[w] or 0, prefix .. "x:"
  local worker, slot, flags, scheme = sub(row, 59), unpack_from(">I4I2I4", row, 17)
  local c = s.usable[flags] == "match" and s.chain_of[scheme]
  call("ZREM", leases_key, id)
  local made, hashes, field = {}, c and ARGV[c + 2] or "", format("%d", slot)
  local blocks = checkpoints(#hashes / 8, s.confirmed[w] or 0, s.node[w])
  if c and blocks[#blocks] ~= 1 then blocks[#blocks + 1] = 1 end
  for k = #blocks, 1, -1 do
    local hash = sub(hashes, blocks[k] * 8 - 7, blocks[k] * 8)
    made[#made + 1] = hash
    if not s.counted[w] then
      call("HSET", x .. hash, field, 1, field .. "+", id)
    elseif call("HINCRBY", x .. hash, field, 1) == 1 or s.replace[w] and blocks[k] == s.node[w] then
      call("HSET", x .. hash, field .. "+", id)
    end
  end
  local epoch, prefill, decode, flight = unpack_from(SUMS, row)
  local uncached = s.prompt - own
  local begun = prefill > 0 and sub(row, 51, 58) or struct.pack(">I4I4", uncached, s.now % 2 ^ 32)
  local head = struct.pack(SUMS, epoch, prefill + uncached, decode, flight + 1)
  call("HSET", load_key, worker, head .. sub(row, 17, 50) .. begun .. worker)
  local lease = struct.pack(LEASE, epoch, slot, uncached, decode_tokens, own, s.prompt, 0, #worker)
  call("HSET", lease_key, id, lease .. worker .. table.concat(made))
  if c then call("SET", prefix .. "c:" .. field .. ":" .. id, hashes) end
  call("ZADD", leases_key, expires_ms, id)
  return uncached
end
