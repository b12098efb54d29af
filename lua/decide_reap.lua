--[[
decide_reap: what expired gives back its load (unless its worker joined anew: another epoch) and its speculation.

Takes their ids, the keys of load, leases and lease, and the key prefix.
--]]
local call, unpack_from, sub, format = redis.call, struct.unpack, string.sub, string.format
local SUMS, LEASE, STARTED, TOMBSTONE = ">I4i4i4i4", ">I4I4I4I4I4I4BB", 1, 3 -- SUMS: the head of a load row

return function(expired, load_key, leases_key, lease_key, prefix)
  for _, gone in ipairs(expired) do
    local lease = call("HGET", lease_key, gone) or struct.pack(LEASE, 0, 0, 0, 0, 0, 0, TOMBSTONE, 0)
    call("ZREM", leases_key, gone)
    call("HDEL", lease_key, gone)
    local epoch, slot, prefill, decode, _, _, stage, length, at = unpack_from(LEASE, lease)
    call("UNLINK", prefix .. "c:" .. format("%d", slot) .. ":" .. gone)
    local worker = sub(lease, at, at + length - 1)
    local row = stage <= STARTED and call("HGET", load_key, worker)
    if row and unpack_from(">I4", row) == epoch then
      local _, p, d, n = unpack_from(SUMS, row)
      row = struct.pack(SUMS, epoch, p - prefill, d - (stage == STARTED and decode or 0), n - 1) .. sub(row, 17)
      call("HSET", load_key, worker, row)
    end
    for from = at + length, #lease, 8 do
      local key, field = prefix .. "x:" .. sub(lease, from, from + 7), format("%d", slot)
      if call("HINCRBY", key, field, -1) <= 0 then call("HDEL", key, field, field .. "+") end
    end
  end
end
