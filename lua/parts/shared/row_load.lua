--[[
shared/row_load: what a lease books on its worker's load row, or gives back.

Takes the key of load and the server's time in ms. Gives add(worker, epoch, prefill, decode, count) -> epoch and slot of
the row, or nothing: the worker is gone, or has joined anew (another epoch; none given: any). A row is never made here.
A prefill may be under way since an idle worker got work, or another prefill ended: of no more than that one's tokens.
--]]
local call = redis.call
local SUMS = ">I4i4i4i4" -- the head of a row: epoch, prefill, decode, count

return function(load_key, now)
  return function(worker, epoch, prefill, decode, count)
    local row = call("HGET", load_key, worker)
    if not row then return end
    local row_epoch, row_prefill, row_decode, row_count, slot = struct.unpack(SUMS .. "I4", row)
    if epoch and epoch ~= row_epoch then return end
    local head = struct.pack(SUMS, row_epoch, row_prefill + prefill, row_decode + decode, row_count + count)
    local under_way, begun = math.max(0, math.min(math.abs(prefill), row_prefill + prefill)), row:sub(51, 58)
    if prefill < 0 or row_prefill <= 0 then begun = struct.pack(">I4I4", under_way, now % 2 ^ 32) end
    call("HSET", load_key, worker, head .. row:sub(17, 50) .. begun .. worker)
    return row_epoch, slot
  end
end
