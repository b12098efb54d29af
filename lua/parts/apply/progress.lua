--[[
apply/progress: the operation progress: prefill of some requests is done. Their booking is given back as the first token
would, and what was predicted is compared with what came.

Takes apply's view of the worker: the key prefix, its name, record, row, truth, what has changed, whether memory is
short; the key of the leases; count, and what reads lists and checks their integers.
--]]
local call = redis.call
local LEASE_HEAD, LEASE_BYTES = ">I4I4I4I4I4I4BB", 26
local NO_LEASE = ("\0"):rep(LEASE_BYTES)
local EPOCH, PREFILL, DECODE, SLOT, FLAGS, UNDER_WAY, SINCE = 1, 2, 3, 5, 6, 14, 15 -- of the row
local PARTIAL, PROVEN = 64, 4 -- two of its flags
local PROGRESS_ITEMS, TOMBSTONE = 64, 3

return function(of, operation, LEASE, count, parse_list, integers)
  local PREFIX, WORKER, HELD = of.prefix, of.worker, of.prefix .. "s:"
  local record, row, truth, changed, short = of.record, of.row, of.truth, of.changed, of.short

  -- Is this still the worker that was proved? Another prompt length says no; so does, twice running, a prompt whose
  -- last block the index lacks: the engine has it, and tells of blocks first. Only a suspicion: a probe decides, not a
  -- tenant.
  local function judge(same_prompt, hash)
    if bit.band(row[FLAGS], PROVEN + PARTIAL) ~= PROVEN or record.shadow or truth.cause or short then return end
    local before, held = record.strikes or 0, #hash == 8 and call("SISMEMBER", HELD .. row[SLOT], hash)
    local strikes = not held and before or held == 1 and 0 or math.min(2, before + 1)
    if strikes ~= before then record.strikes, changed.record = strikes, true end
    local why = not same_prompt and "prompt" or strikes == 2 and "blocks"
    if why then count("suspect_" .. why) end
    if why and not record.suspect then record.suspect, changed.record, changed.suspect = why, true, 1 end
  end

  -- Prefill of these is done: give its booking back as the first token would, and compare prediction with outcome. Of
  -- several prompts (their id begins wf--) each gives back its share; the lease keeps what is left of both.
  local function started(id, cached, prompt_tokens, time)
    local lease = call("HGET", LEASE, id)
    local epoch, slot, prefill, decode, matched, prompt, stage, length = struct.unpack(LEASE_HEAD, lease or NO_LEASE)
    if not lease or stage == TOMBSTONE then return count("late") end
    if lease:sub(LEASE_BYTES + 1, LEASE_BYTES + length) ~= WORKER then return count("foreign") end
    local mark, expected = id:sub(4, 4), prompt
    local several = mark == "-"
    if prompt > 0 and not several and mark ~= "_" then -- else renew rebuilt it, or nobody could foresee this prompt
      count(cached == matched and "exact" or cached > matched and "over" or "short")
      if prompt_tokens ~= prompt then count("prompt") end
      judge(prompt_tokens == prompt, call("GETRANGE", ("%sc:%d:%s"):format(PREFIX, slot, id), -8, -1))
      prompt = 0 -- once: a beam search goes on with longer prompts under the same id
    end
    if stage > 0 then -- the first byte was told before
      return prompt < expected and call("HSET", LEASE, id, lease:sub(1, 20) .. "\0\0\0\0" .. lease:sub(25))
    end
    local left = several and math.max(0, prompt - prompt_tokens) or 0
    local kept, done = math.floor(prefill * left / math.max(1, prompt)), left == 0 and 1 or 0
    if epoch == row[EPOCH] then
      row[PREFILL], row[DECODE], changed.row = row[PREFILL] - prefill + kept, row[DECODE] + done * decode, true
      row[UNDER_WAY], row[SINCE] = math.max(0, math.min(prefill, row[PREFILL])), time % 2 ^ 32
    end
    local head = struct.pack(LEASE_HEAD, epoch, slot, kept, decode, matched, several and left or prompt, done, length)
    call("HSET", LEASE, id, head .. lease:sub(LEASE_BYTES + 1))
  end

  function operation.progress(data, time)
    local list = parse_list(data)
    if not list or #list > PROGRESS_ITEMS then return false end
    for _, item in ipairs(list) do
      if type(item) ~= "table" or type(item[1]) ~= "string" or #item ~= 3 or not integers(item, 2) then return false end
    end
    for _, item in ipairs(list) do started(item[1], item[2], item[3], time) end
  end
end
