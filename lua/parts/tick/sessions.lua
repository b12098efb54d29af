--[[
tick/sessions: keeps the ledger of sessions, once a second: ends places, pauses sessions, and lets in those that wait.

The ledger begins to bind when some engine whose cache is full computes prompts for BUSY of its time, and goes on while
one does for HARDLY_BUSY of its time, and for BINDS_MS afterwards; then all of its keys are deleted. Engines whose
capacity is not known take no part. In a fleet whose engines hand prompts over, neither do those that serve nothing
alone, unless there is no other engine. One that gets prompts computed is as busy as the least busy of those that may
compute them, or as itself if that is more.
A place ends when its session had no request for the time in which its engine computes a whole cache (5 s to 60 s): to
compute a context again is then cheaper than to keep it. A tier from which a token is loaded in LOAD_SHARE of the time
to compute it keeps contexts as well as the GPU, so where it is larger, it counts as the cache (it has what the GPU has,
too), up to GPU_TIMES the GPU. Of a tier that several engines read each has a part.
An engine whose sessions need more than its capacity (what the requests of others leave of its cache) pauses its
youngest idle sessions until the rest fits, unless it has time to compute. (It has, if it is less than
HARDLY_BUSY. Where most sessions in have not called tools, the bound is BUSY, since nobody tells their ends: some of the
places that seem taken are of sessions that are over.) Then those who wait are let
in, in the order of the line, up to ADMIT of a capacity: if no engine has room for the first of them, all wait. A new
session is taken from the tenant whose sessions have the fewest tokens. A paused session gets a place after
paused_max_ms in any case, a new one after HELD_LIMIT times the wait that it was told.

Takes the key prefix, the time in ms, the constants of the replica, the load rows (worker id, row, in turn), and the
value that the last tick returned (nil: the ledger did not bind, or the replica was of a version without a ledger).
A replica that does not know the blocks' size of some proven engine, as it has just started, changes nothing.
Returns, if it binds, the tokens below which a prompt without name and tools is none of a session.
Cost: O(sessions), at most 2,048, of which 256 end and 256 are let in; each of the latter O(line + engines)
--]]
local call, unpack_from, sub, format = redis.call, struct.unpack, string.sub, string.format
local max, min, band, huge = math.max, math.min, bit.band, math.huge
local BUSY, HARDLY_BUSY = 0.5, 0.3 -- share of an engine's time in prefill
local LOAD_SHARE = 0.2 -- share of the time to compute a token, below which loading it is clearly cheaper
local GPU_TIMES = 1.5 -- with a tier; of more contexts too many are under way at a time and wait for the GPU's memory
local ENTERS_WAIT_S = 0.3 -- most seconds of prefill ahead at an engine that has time
local BINDS_MS, PACE_LEARNS = 60000, 0.008
local LEAST_GAP_MS, MOST_GAP_MS = 5000, 60000
local HELD_LIMIT, LAST_TURN_MS = 1.5, 1500 -- ms: a turn waits for the next second, and for a poll
local UNHEARD_MS = 5000 -- a held session that no replica asks for leaves the line
local AGENT_KEPT_MS, OTHER_KEPT_MS = 600000, 120000 -- for which sessions without a place and a request are known
local LEASE_CHECK_MS = 30000 -- requests that are under way for longer may have been lost with their replica
local LEAST_SHARE = 128 -- a prompt below this part of the smallest cache, without name and tools, is no session's
local NO_ROLE = { gives = 0, takes = 0, alone = true }
local NONE = 2147483648 -- more tokens than any prompt has
local EMPTY = ("\0"):rep(SESSION_BYTES) -- stands for a record that is none
local MOST_CHANGES, MOST_SAMPLES, MOST_YIELDS, YIELDS_KEPT_S = 256, 256, 256, 30

-- Return a function of an engine's slot, its blocks on the GPU and the seconds to compute a token there: the blocks of
-- contexts that it can keep.
local function keeps(prefix)
  local of = {}
  for _, users in ipairs(call("HVALS", prefix .. "tiers")) do
    for at = 1, #users, TIER_BYTES do
      local main, seconds, _, blocks = unpack_from(TIER, users, at)
      of[main] = of[main] or {}
      table.insert(of[main], { seconds = seconds, blocks = blocks * TIER_BYTES / #users })
    end
  end
  return function(slot, gpu, compute_s)
    local most = gpu
    for _, tier in ipairs(of[slot] or {}) do
      if tier.seconds < LOAD_SHARE * compute_s then
        most = max(most, min(tier.blocks, GPU_TIMES * gpu))
      end
    end
    return most
  end
end

-- Return the engines that take part, by slot; whether the ledger binds by their state; the smallest cache in tokens.
-- bound: it binds already.
local function engines_of(prefix, rows, constants, now, bound)
  local engines, binds, smallest, sizes = {}, false, huge, {}
  local kept, least, others = keeps(prefix), {}, false -- least: share in prefill, by class of those who compute
  for scheme, tokens in constants.block_sizes:gmatch("(%d+)=(%d+)") do sizes[tonumber(scheme)] = tonumber(tokens) end
  for i = 1, #rows, 2 do
    local row = rows[i + 1]
    local prefill, decode, _, slot, flags, scheme, tps, foreign, foreign_decode, blocks, capacity, share, _, _, since
      = unpack_from(ROW_PREFILL_TOKENS_TO_SINCE_MS, row, PREFILL_TOKENS_AT)
    if not sizes[scheme] and band(flags, FLAG_PROVEN) ~= 0 and capacity > 0 then return nil end
    local size = sizes[scheme] or 0
    local routable, role = band(flags, ROUTABLE_MASK) == ROUTABLE, constants.roles and constants.roles[slot] or NO_ROLE
    local answers = role.alone or role.takes ~= 0
    if routable then
      share = (include "shared/busy_share")(share, prefill > 0, since, now) / BUSY_ALWAYS
      others = others or answers
      least[role.gives] = min(least[role.gives] or 1, share)
    end
    if capacity * size > 0 and routable then
      tps = tps > 0 and tps or UNKNOWN_SPEED
      local tokens = kept(slot, capacity, 1 / tps) * size
      engines[slot] = { worker = rows[i], tokens = tokens, gpu_tokens = capacity * size,
        context = decode + foreign_decode, busy_share = share, role = role, answers = answers,
        full = blocks >= FULL_SHARE * capacity, waits = prefill + foreign >= ENTERS_WAIT_S * tps,
        gap = max(LEAST_GAP_MS, min(MOST_GAP_MS, tokens / tps * 1000)), taken = 0, booked = 0, inside = 0, idle = {} }
    end
  end
  for slot, engine in pairs(engines) do
    if others and not engine.answers then
      engines[slot] = nil
    else
      local role, makers = engine.role, huge
      for class, share in pairs(role.gives == 0 and least or {}) do
        if band(role.takes, class) ~= 0 then makers = min(makers, share) end
      end
      if makers < huge then engine.busy_share = max(engine.busy_share, makers) end
      binds = binds or engine.full and engine.busy_share >= (bound and HARDLY_BUSY or BUSY)
      smallest = min(smallest, engine.tokens)
    end
  end
  return engines, binds, smallest
end

return function(prefix, now, constants, rows, bound)
  local ledger, line = (include "shared/sessions")(prefix), prefix .. "session_line"
  local state = ledger.state()
  local engines, binds, smallest = engines_of(prefix, rows, constants, now, bound or state.until_ms >= now)
  if not engines then return bound end
  local new_let_in, tenants = 0, {} -- tenants: tokens of their sessions that have places
  if binds then
    state.until_ms = now + BINDS_MS
  elseif not bound and state.until_ms == 0 then
    return nil
  elseif state.until_ms < now or state.until_ms > now + BINDS_MS then
    call("UNLINK", prefix .. "sessions", line, prefix .. "places")
    return nil
  end

  local changes, let_ins = MOST_CHANGES, MOST_CHANGES
  local function change(sid, changed)
    changes = changes - 1
    local r = ledger.read(sid)
    changed(r)
    ledger.write(sid, r)
  end
  local function enter(engine, tenant, own)
    engine.taken, engine.inside, state.inside = engine.taken + own, engine.inside + 1, state.inside + 1
    tenants[tenant] = (tenants[tenant] or 0) + own
  end

  -- Count every session, end what is over, and make the line anew if it does not have those that are held. Returns the
  -- share of its time in prefill below which an engine has time, and the held sessions in the order of the line.
  local function count()
    local held, shared, all = {}, {}, call("HGETALL", prefix .. "sessions")
    local every, tool_users = math.ceil(#all / 2 / MOST_SAMPLES), 0
    state.inside = 0
    for k = 1, #all, 2 do
      local sid, packed = all[k], all[k + 1]
      if #packed < SESSION_BYTES + SESSION_TEXTS then
        ledger.drop(sid)
        packed = EMPTY
      end
      local first, since, heard, slot, tokens, common, booked, _, told, _, running, place, _, traits, priority, at
        = unpack_from(SESSION, packed)
      local engine, passed, unheard = engines[slot], max(0, now - since), now - heard > UNHEARD_MS
      if changes > 0 and (since > now or heard > now) then -- the clock has stepped back
        change(sid, function(r) r.since, r.heard = min(r.since, now), min(r.heard, now) end)
      end
      local lease = changes > 0 and running > 0 and passed > LEASE_CHECK_MS
        and (call("HGET", prefix .. "lease", sub(packed, at + SESSION_TEXTS)) or "")
      if lease and (lease == "" or lease:byte(LEASE_STAGE_AT) == STAGE_ENDED) then
        running, booked, passed = 0, 0, 0
        change(sid, function(r) r.running, r.booked, r.since = 0, 0, now end)
      end
      if place == PLACE_IN then
        local idle = running == 0
        if not engine or idle and (heard > 0 and unheard or heard == 0 and passed > engine.gap) then
          if changes > 0 then change(sid, ledger.leaves) end
        else
          local own = max(0, tokens - min(common, state.common))
          enter(engine, sub(packed, at, at + 7), own)
          if band(traits, TRAIT_USES_TOOLS) ~= 0 then tool_users = tool_users + 1 end
          engine.booked = engine.booked + booked
          if idle and heard == 0 then engine.idle[#engine.idle + 1] = { sid = sid, first = first, own = own } end
        end
      elseif place ~= PLACE_OUT then
        if unheard and changes > 0 then
          change(sid, ledger.leaves)
        else
          local r = { sid = sid, first = first, since = since, slot = slot, tokens = tokens, shared = common,
            told = told, place = place, priority = priority, tenant = sub(packed, at, at + 7) }
          r.stands = ledger.stands(r)
          held[#held + 1] = r
        end
      elseif changes > 0 and running == 0 and packed ~= EMPTY
          and passed > (band(traits, TRAIT_PLACED + TRAIT_CALLED) ~= 0 and AGENT_KEPT_MS or OTHER_KEPT_MS) then
        changes = changes - 1
        ledger.judge(ledger.read(sid), state, false)
        ledger.drop(sid)
      end
      if place ~= PLACE_OUT and (k + 1) / 2 % every == 0 then shared[#shared + 1] = common end
    end
    if #held ~= call("ZCARD", line) then
      call("UNLINK", line)
      for _, r in ipairs(held) do call("ZADD", line, format("%.2f", r.stands), r.sid) end
    end
    table.sort(shared)
    state.common = shared[math.ceil(#shared / 4)] or 0
    table.sort(held, function(p, q) return p.stands < q.stands or p.stands == q.stands and p.sid < q.sid end)
    return 2 * tool_users >= state.inside and HARDLY_BUSY or BUSY, held
  end

  -- Compute the capacities, and pause the youngest idle sessions of engines whose sessions do not fit. busy: the share
  -- of its time in prefill below which an engine has time.
  local function pause(busy)
    local gap = 0
    for _, engine in pairs(engines) do
      gap = max(gap, engine.gap)
      engine.has_time = engine.busy_share < busy and not engine.waits
      engine.capacity = max(0, engine.tokens - state.common - max(0, engine.context - engine.booked))
      table.sort(engine.idle, function(p, q) return p.first > q.first or p.first == q.first and p.sid > q.sid end)
      for _, idle in ipairs(engine.idle) do
        if engine.taken <= engine.capacity or engine.busy_share < busy then break end
        local yields = prefix .. "yields:" .. engine.worker
        change(idle.sid, function(r)
          r.place = PLACE_OUT
          call("RPUSH", yields, sub(r.reservation, 1, CLIENT_AT - 1))
        end)
        call("LTRIM", yields, -MOST_YIELDS, -1)
        call("EXPIRE", yields, YIELDS_KEPT_S)
        engine.taken, engine.inside, state.inside = engine.taken - idle.own, engine.inside - 1, state.inside - 1
      end
    end
    state.gap = gap > 0 and gap or state.gap
  end

  -- Let a held session in at its own engine if that has room, else at the engine with the most room; false if none has
  -- room. any: in any case.
  local function let_in(r, any)
    if let_ins <= 0 then return false end -- the rest follows a second later
    local own, at, most = ledger.own_tokens(r, state), nil, -huge
    for slot, engine in pairs(engines) do
      local room = ADMIT * engine.capacity - engine.taken - own
      if room >= 0 or engine.inside == 0 or engine.has_time and engine.context + own <= engine.gpu_tokens then
        if slot == r.slot then room = huge end
      elseif not any then
        room = -huge
      end
      if room > most or room == most and at and slot < at then at, most = slot, room end
    end
    local engine = engines[at]
    if not engine then return false end
    let_ins = let_ins - 1
    enter(engine, r.tenant, own)
    if engine.taken > ADMIT * engine.capacity then engine.has_time = false end
    if r.place == PLACE_NEW then new_let_in = new_let_in + 1 end
    change(r.sid, function(record)
      ledger.enters(record)
      record.slot = at
    end)
    call("ZREM", line, r.sid)
    return true
  end

  -- Each class is served before the next; in it paused sessions stand before new ones. Behind a session that finds no
  -- room only those that are overdue are let in.
  local function serve_line(held)
    local fresh, blocked = {}, false -- fresh: new sessions of a class
    local function let_fresh_in()
      while not blocked and fresh[1] do
        local at = 1
        for k = 2, #fresh do
          if (tenants[fresh[k].tenant] or 0) < (tenants[fresh[at].tenant] or 0) then at = k end
        end
        blocked = not let_in(table.remove(fresh, at), false)
      end
      fresh = {}
    end
    for k, r in ipairs(held) do
      if k > 1 and r.priority ~= held[k - 1].priority then let_fresh_in() end
      local most = r.place == PLACE_PAUSED and constants.paused_max_ms or HELD_LIMIT * r.told - LAST_TURN_MS
      local overdue = now - r.since >= most
      if r.place == PLACE_PAUSED or overdue then
        if (overdue or not blocked) and not let_in(r, overdue) then blocked = true end
      else
        fresh[#fresh + 1] = r
      end
    end
    let_fresh_in()
  end

  local busy, held = count()
  pause(busy)
  serve_line(held)
  if call("ZCARD", line) > 0 or new_let_in > 0 then
    local pace = state.pace > 0 and state.pace or state.inside * FIRST_PACE
    state.pace = pace + PACE_LEARNS * (new_let_in - pace)
  end
  call("UNLINK", prefix .. "places")
  for slot, engine in pairs(engines) do ledger.keep_engine(slot, engine.taken, engine.capacity, engine.has_time) end
  ledger.keep_state(state)
  if call("HLEN", prefix .. "sessions") >= MAX_SESSIONS / 2 then return NONE end -- the rest is for names and tools
  return max(1, min(NONE, smallest / LEAST_SHARE))
end
