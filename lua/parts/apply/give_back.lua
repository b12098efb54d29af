--[[
apply/give_back: takes booked load off the worker's row, as shared/row_load does. apply has the row unpacked.

Takes the state of apply (reads row; marks changed.row). Returns
  prefill(epoch, tokens, time): gives back tokens of a prefill that has ended; time in ms
  request(epoch, decode_tokens, sign): ends a request in flight (sign -1), or counts it again (1)
Both do nothing if the lease names another epoch than the row has.
--]]
local busy_share, under_way = include "shared/busy_share", include "shared/under_way"

return function(state)
  local row, changed, give_back = state.row, state.changed, {}

  function give_back.prefill(epoch, tokens, time)
    if epoch ~= row[EPOCH_FIELD] then return end
    local before, since = row[PREFILL_TOKENS_FIELD], row[SINCE_MS_FIELD]
    row[PREFILL_TOKENS_FIELD], changed.row = before - tokens, true
    row[BUSY_SHARE_FIELD] = select(2, busy_share(row[BUSY_SHARE_FIELD], before > 0, since, time))
    local under_way_before, passed_ms = row[UNDER_WAY_TOKENS_FIELD], (time - since) % U32
    row[UNDER_WAY_TOKENS_FIELD] = under_way(under_way_before, passed_ms, tokens, before - tokens)
    row[SINCE_MS_FIELD] = time % U32
  end

  function give_back.request(epoch, decode_tokens, sign)
    if epoch ~= row[EPOCH_FIELD] then return end
    row[DECODE_TOKENS_FIELD] = row[DECODE_TOKENS_FIELD] + sign * decode_tokens
    row[IN_FLIGHT_FIELD], changed.row = row[IN_FLIGHT_FIELD] + sign, true
    if row[IN_FLIGHT_FIELD] == 0 then row[PREFILL_TOKENS_FIELD], row[DECODE_TOKENS_FIELD] = 0, 0 end
  end

  return give_back
end
