--[[
shared/row_load: books load of a lease on its worker's row, or gives it back.

Takes the key of load and the server's time in ms. Returns add(worker, epoch, prefill, decode, count, unsent), which
adds the three numbers to the row and returns the row's epoch, its slot, and the row as it was. It does nothing and
returns nothing if the worker is gone or has joined anew, so that its row has another epoch (epoch nil: any is right).
It never creates a row. unsent: the load is that of a request which never reached the engine, so no prefill ended there.
When the last request in flight ends, the booked tokens become 0, whatever an older script left on the row.
It also updates three numbers of the row: since_ms (when a prefill last began on the idle worker, or ended), the most
tokens that the prefill under way can have (on an idle worker all that is booked; after an end as shared/under_way
says), and the share of time in prefill (shared/busy_share).
--]]
local call = redis.call

return function(load_key, now)
  return function(worker, epoch, prefill, decode, count, unsent)
    local row = call("HGET", load_key, worker)
    if not row then return end
    local row_epoch, row_prefill, row_decode, row_count, slot = struct.unpack(ROW_EPOCH_TO_SLOT, row)
    if epoch and epoch ~= row_epoch then return end
    local left = row_prefill + prefill
    decode, count = row_decode + decode, row_count + count
    if count == 0 then left, decode = 0, 0 end
    local head = struct.pack(ROW_EPOCH_TO_IN_FLIGHT, row_epoch, left, decode, count)
    local share, evicted, tokens, since = struct.unpack(ROW_BUSY_SHARE_TO_SINCE_MS, row, BUSY_SHARE_AT)
    if unsent and left > 0 then
      tokens = math.min(tokens, left)
    elseif prefill < 0 or row_prefill <= 0 then
      local ended = row_prefill > 0
      tokens = ended and (include "shared/under_way")(tokens, (now - since) % U32, -prefill, left) or math.max(0, left)
      share, since = select(2, (include "shared/busy_share")(share, row_prefill > 0, since, now)), now % U32
    end
    local work = struct.pack(ROW_BUSY_SHARE_TO_SINCE_MS, share, evicted, tokens, since)
    local between, rest = row:sub(AFTER_IN_FLIGHT, BUSY_SHARE_AT - 1), row:sub(AFTER_SINCE_MS)
    call("HSET", load_key, worker, head .. between .. work .. rest)
    return row_epoch, slot, row
  end
end
