--[[
apply/progress: the operation `progress`, by which an engine reports that the prefill of some requests is done. Their
booked prefill is given back, as by a first token, and the predicted match is compared with the tokens that the engine
had cached. The engine reported the blocks of these requests before, so the index has them, and the reservations stop
counting as requests that will compute these blocks.

Takes the state of apply (key prefix, worker, record, row, truth, changed, short), the table of operations, to which it
adds one, the key of the leases, apply/give_back, and five functions: count(counter), parse_list(data),
integers(list, first); confirm(ids) and reopen(id, lease) of apply/reservations, nil for an engine without it.
--]]
local call = redis.call
local NO_LEASE = ("\0"):rep(LEASE_BYTES)
local PROGRESS_ITEMS, STRIKES = 64, 2

return function(state, operation, lease_key, give_back, count, parse_list, integers, confirm, reopen)
  local prefix, worker_id, held_prefix = state.prefix, state.worker, state.prefix .. "s:"
  local record, row, truth, changed, short = state.record, state.row, state.truth, state.changed, state.short

  -- Suspect that the engine tokenises or hashes otherwise than routers if the prompt's length differs, or if twice in a
  -- row the index lacks the last block of a prompt, though engines report blocks before progress. A suspicion only asks
  -- for a probe, because a tenant's prompts must not stop the requests to a healthy worker.
  -- Returns true if the index is complete and has the last block.
  local function judge(same_prompt, hash)
    if bit.band(row[FLAGS_FIELD], FLAG_PROVEN + FLAG_PARTIAL) ~= FLAG_PROVEN then return end
    if record.shadow or truth.cause or short then return end
    local before, held = record.strikes or 0, #hash == 8 and call("SISMEMBER", held_prefix .. row[SLOT_FIELD], hash)
    local strikes = not held and before or held == 1 and 0 or math.min(STRIKES, before + 1)
    if strikes ~= before then record.strikes, changed.record = strikes, true end
    local why = not same_prompt and "prompt" or strikes == STRIKES and "blocks"
    if why then count("suspect_" .. why) end
    if why and not record.suspect then record.suspect, changed.record, changed.suspect = why, true, 1 end
    return held == 1
  end

  -- End the prefill of one prompt of a reservation. Of several prompts each gives back its share of the booked prefill,
  -- rounded up, so that nothing is left booked after the last prompt.
  local function started(id, cached, prompt_tokens, time)
    local lease = call("HGET", lease_key, id)
    if lease and reopen then lease = reopen(id, lease) end
    local epoch, slot, prefill, decode, matched, prompt, stage, length = struct.unpack(LEASE, lease or NO_LEASE)
    if not lease or stage == STAGE_TOMBSTONE then return count("late") end
    if lease:sub(LEASE_WORKER_ID_AT, LEASE_BYTES + length) ~= worker_id then return count("foreign") end
    local mark = id:sub(MARK_AT, MARK_AT)
    local several = mark == MARK_SEVERAL_PROMPTS
    -- Predicted match and cached tokens are compared once, because a beam search goes on with longer prompts under the
    -- same id; never if renew rebuilt the lease (its prompt's length is unknown), or the router had no token ids.
    local compares = prompt > 0 and matched < JUDGED and not several and mark ~= MARK_ESTIMATED
    if compares then
      count(cached == matched and "exact" or cached > matched and "over" or "short")
      if prompt_tokens ~= prompt then count("prompt") end
      if judge(prompt_tokens == prompt, call("GETRANGE", ("%sc:%d:%s"):format(prefix, slot, id), -8, -1)) then
        (include "shared/release_speculation")(prefix)(id, lease)
        lease = lease:sub(1, LEASE_BYTES + length) -- without checkpoints
      end
      matched = cached + JUDGED
    end
    if stage > STAGE_BOOKED then -- settle has ended the prefill before
      if not compares then return end
      local head = struct.pack(LEASE, epoch, slot, prefill, decode, matched, prompt, stage, length)
      return call("HSET", lease_key, id, head .. lease:sub(LEASE_WORKER_ID_AT))
    end
    local share = several and prompt > 0 and math.ceil((prompt - matched) * prompt_tokens / prompt) or prefill
    local kept = math.max(0, prefill - share)
    give_back.prefill(epoch, prefill - kept, time)
    local new_stage = kept == 0 and STAGE_STARTED or STAGE_BOOKED
    local head = struct.pack(LEASE, epoch, slot, kept, decode, matched, prompt, new_stage, length)
    call("HSET", lease_key, id, head .. lease:sub(LEASE_WORKER_ID_AT))
  end

  function operation.progress(data, time)
    local list = parse_list(data)
    if not list or #list > PROGRESS_ITEMS then return false end
    for _, item in ipairs(list) do
      if type(item) ~= "table" or type(item[1]) ~= "string" or #item ~= 3 or not integers(item, 2) then return false end
    end
    local ids = {}
    for i, item in ipairs(list) do
      started(item[1], item[2], item[3], time)
      ids[i] = item[1]
    end
    if confirm then confirm(ids) end
  end
end
