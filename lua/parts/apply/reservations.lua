--[[
apply/reservations: the operations of an engine that reports the ends of requests (`ends` in its join).
  ended     a list of [reservation id, tokens of the answer, reason]: these requests have left the engine. Each lease
            gives its load back at once and becomes ENDED; settle, or its expiry, does the rest. A prefill leg gives
            only its prefill back.
  running   a list of 0 and reservation ids: the engine has these, though it has reported no prefill of them. With 1 in
            place of 0 a list of all that it has begins here.
  tally     [count, high, low]: digest of all that it has, sent with each heartbeat. A difference asks for the whole
            list by the command `list`. If Redis has what the engine has, the worker gets the flag ENDS (which tick
            takes away when no right tally comes), and what is older than the list has ended.
Redis keeps the reservations in the key running:<worker_id> (shared/running), `progress` adds to it, too. A reservation
counts with 8 of its random characters.

Guarantee: each lease gives its load back once, whichever of ended, settle and expiry comes first. The report of a
request that settle has ended before changes no load. An engine that goes on with a request under an id that had ended
(the steps of a beam search), or after it was taken for dead (tick/dead_engine), gets the load again.
Takes the state of apply (prefix, worker, record, changed, lists), the table of operations, to which it adds three, the
key of the leases, the server's time in ms, apply/give_back, and three functions: count(counter, number),
parse_list(data), integers(list, first). An operation returns "unfinished" if the next call must apply its entry again.
Returns four functions:
  confirm(ids): notes that the engine has these reservations
  reopen(id, lease): books the load of a lease again that lost it, though the engine has the request; returns the lease
                     as it is then
  leave(): ends some of what a worker that leaves has had; returns "unfinished" if others are left
  price(name, bytes): the blocks that an entry of this operation, with data of so many bytes, takes as long as
--]]
local call = redis.call
local ID_BYTES, RANDOM_AT, MOST_KEPT = 25, 5, 4096
local ENDED_AT_ONCE = 32 -- most reservations that one call ends because a list lacks them, or their worker leaves
local BYTES_PER_BLOCK, MEMBERS_PER_BLOCK = 5, 8 -- what takes as long as a block: of `ended`; of the set, in `tally`

return function(state, operation, lease_key, now, give_back, count, parse_list, integers)
  local prefix, worker_id, record, row, changed = state.prefix, state.worker, state.record, state.row, state.changed
  local running_key, now_text = prefix .. "running:" .. worker_id, string.format("%.0f", now)
  local release_speculation = include "shared/release_speculation"

  local function is_id(id) return type(id) == "string" and #id >= ID_BYTES and #id <= 64 end

  local function client_of(id) return (include "shared/client_use")(prefix, id, now) end

  local function confirm(ids)
    local members = {}
    for _, id in ipairs(ids) do
      if is_id(id) then
        members[#members + 1] = now_text
        members[#members + 1] = id
      end
    end
    if members[1] and call("ZCARD", running_key) + #members / 2 <= MOST_KEPT then
      call("ZADD", running_key, unpack(members))
    end
  end

  -- Note that the engine is done with a prefill leg. Its context stays booked until settle ends it, or it expires,
  -- because the engine keeps the blocks until another engine has taken them.
  local function leg_ended(id, lease)
    local epoch, slot, _, decode, matched, prompt, stage, length = struct.unpack(LEASE, lease)
    if stage ~= STAGE_BOOKED then return end
    if #lease > LEASE_BYTES + length then release_speculation(prefix)(id, lease) end
    local head = struct.pack(LEASE, epoch, slot, 0, decode, matched, prompt, STAGE_STARTED, length)
    call("HSET", lease_key, id, head .. worker_id)
  end

  local function ended(id, tokens, time)
    local lease = call("HGET", lease_key, id)
    if not lease then return false end
    local epoch, slot, prefill, decode, matched, prompt, stage, length = struct.unpack(LEASE, lease)
    tokens = math.min(tokens, decode) -- a broken engine must not lock the client out
    if stage > STAGE_STARTED or lease:sub(LEASE_WORKER_ID_AT, LEASE_BYTES + length) ~= worker_id then return false end
    if stage == STAGE_BOOKED then give_back.prefill(epoch, prefill, time) end
    if id:sub(MARK_AT, MARK_AT) == MARK_PREFILL_LEG then
      leg_ended(id, lease)
      return true
    end
    give_back.request(epoch, decode, -1)
    -- The engine has reported all blocks of the request before.
    if #lease > LEASE_BYTES + length then release_speculation(prefix)(id, lease) end
    if #id >= CLIENT_AT then
      local client = client_of(id)
      client.let_go()
      client.spend(tokens)
    end
    local head = struct.pack(LEASE, epoch, slot, tokens, decode, matched, prompt, STAGE_ENDED, length)
    call("HSET", lease_key, id, head .. worker_id)
    return true
  end

  -- Book the load of a lease again that the engine goes on with: it was ENDED, or lost its load because the worker was
  -- taken for dead, so that it has another epoch than the row.
  local function reopen(id, lease)
    local epoch, slot, tokens, decode, matched, prompt, stage, length = struct.unpack(LEASE, lease)
    local is_ended = stage == STAGE_ENDED
    if not is_ended and (stage > STAGE_STARTED or epoch == row[EPOCH_FIELD]) then return lease end
    if lease:sub(LEASE_WORKER_ID_AT, LEASE_BYTES + length) ~= worker_id then return lease end
    if is_ended then
      if #id >= CLIENT_AT then client_of(id).spend(-tokens) end
      stage, tokens = STAGE_STARTED, 0
    end
    epoch = row[EPOCH_FIELD]
    row[PREFILL_TOKENS_FIELD] = row[PREFILL_TOKENS_FIELD] + tokens
    give_back.request(epoch, decode, 1)
    local head = struct.pack(LEASE, epoch, slot, tokens, decode, matched, prompt, stage, length)
    local reopened = head .. lease:sub(LEASE_WORKER_ID_AT)
    call("HSET", lease_key, id, reopened)
    return reopened
  end

  function operation.ended(data, time)
    local list = parse_list(data)
    if not list or #list > RUNNING_AT_ONCE then return false end
    local ids, done = {}, 0
    for i, item in ipairs(list) do
      if type(item) ~= "table" or #item ~= 3 or not is_id(item[1]) or not integers({ item[2] }, 1)
        or type(item[3]) ~= "string" then
        return false
      end
      ids[i] = item[1]
    end
    for _, item in ipairs(list) do
      if ended(item[1], item[2], time) then done = done + 1 end
    end
    if ids[1] then call("ZREM", running_key, unpack(ids)) end
    if done > 0 then count("ended", done) end
    if done < #list then count("ended_before", #list - done) end
  end

  function operation.running(data)
    local list = parse_list(data)
    if not list or #list > RUNNING_AT_ONCE + 1 or (list[1] ~= 0 and list[1] ~= 1) then return false end
    local begins = table.remove(list, 1) == 1
    for _, id in ipairs(list) do
      if not is_id(id) then return false end
    end
    if begins then
      record.listing, changed.record, state.lists = now, true, "begun"
      if call("ZCARD", running_key) > MOST_KEPT / 2 then call("UNLINK", running_key) end
    end
    confirm(list)
    for _, id in ipairs(list) do
      local lease = call("HGET", lease_key, id)
      if lease then reopen(id, lease) end
    end
  end

  -- End some of the reservations that the set has with a time in this range; "unfinished" if others may be left.
  local function end_some(last)
    local old = call("ZRANGEBYSCORE", running_key, "-inf", last, "LIMIT", 0, ENDED_AT_ONCE)
    local done = 0
    for _, id in ipairs(old) do
      if id ~= "" and ended(id, 0, now) then done = done + 1 end
    end
    if old[1] then call("ZREM", running_key, unpack(old)) end
    if done > 0 then count("ended_unseen", done) end
    return #old == ENDED_AT_ONCE and "unfinished" or nil
  end

  local function leave() return end_some("+inf") end

  function operation.tally(data)
    local told = parse_list(data)
    if not told or #told ~= 3 or not integers(told, 1) then return false end
    local from = string.format("%.0f", record.listing or 0)
    local n, high, low = 0, 0, 0
    for _, id in ipairs(call("ZRANGEBYSCORE", running_key, from, "+inf")) do
      if id ~= "" then
        local left, right = struct.unpack(HASH_HALVES, id, RANDOM_AT)
        n, high, low = n + 1, high + left, low + right
      end
    end
    if n ~= told[1] or high % U32 ~= told[2] or low % U32 ~= told[3] then
      count("tally", 1)
      state.lists = "asked"
      return
    end
    call("ZADD", running_key, now_text, "")
    if bit.band(row[FLAGS_FIELD], FLAG_ENDS) == 0 then
      row[FLAGS_FIELD], changed.row = row[FLAGS_FIELD] + FLAG_ENDS, true
    end
    if not record.listing then return end
    if end_some("(" .. from) then return "unfinished" end
    record.listing, changed.record = nil, true
  end

  local function price(name, bytes)
    if name == "ended" then return bytes / BYTES_PER_BLOCK end
    if name == "leave" or name == "tally" and record.listing then return math.huge end -- may end ENDED_AT_ONCE
    return math.max(bytes / 8, name == "tally" and call("ZCARD", running_key) / MEMBERS_PER_BLOCK or 0)
  end

  return confirm, reopen, leave, price
end
