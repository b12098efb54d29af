--[[
tick/sessions: keeps the ledger of sessions, once a second: ends places, pauses sessions, and lets in those that wait.

The ledger binds while some engine whose cache is full computes prompts for BUSY of its time or more, and for BINDS_MS
afterwards; then all of its keys are deleted. Engines without a known capacity take no part.
A place ends when its session had no request for the time in which its engine could compute a whole cache (5 s to 60 s).
An engine whose sessions need more than its capacity loses places, of its youngest idle sessions, until the rest fits;
not while it has time to compute. Those who wait get places in the order of the line: the first of them that no engine
has room for keeps all behind it waiting. A new session is taken from the tenant whose sessions have the fewest tokens
in the engines. A paused session gets a place after paused_max_ms in any case.

Takes the key prefix, the time in ms, the constants of the replica, the rows (worker id, row, in turn), and whether the
ledger bound so far.
Returns whether it binds.
Cost: O(sessions), at most 4,096; 256 of the line
--]]
local call, unpack_from, sub, format = redis.call, struct.unpack, string.sub, string.format
local max, min, band, huge = math.max, math.min, bit.band, math.huge
local BUSY = 0.5
local ENTERS_WAIT_S = 0.3 -- most seconds of prefill ahead at an engine that has time to compute
local BINDS_MS = 60000
local LEAST_GAP_MS, MOST_GAP_MS = 5000, 60000
local UNHEARD_MS = 5000 -- a held session that no replica asks for is dropped
local AGENT_KEPT_MS = 600000 -- a session without a place is forgotten, an agent's
local STRANGER_KEPT_MS = 120000 -- and another's
local LEASE_CHECK_MS = 30000 -- requests that are under way for longer may have been lost with their replica
local LEAST_SHARE = 512 -- a prompt that is smaller by this than the smallest cache is not looked at
local MOST_HELD, MOST_SAMPLES, YIELDS, YIELDS_KEPT_S = 256, 256, 256, 30

return function(prefix, now, constants, rows, bound)
  local engines, binds, any_capacity = {}, false, huge
  local ledger = (include "shared/sessions")(prefix, now)
  local sizes = {}
  for scheme, tokens in constants.block_sizes:gmatch("(%d+)=(%d+)") do sizes[tonumber(scheme)] = tonumber(tokens) end
  for i = 1, #rows, 2 do
    local row = rows[i + 1]
    local prefill, decode, _, slot, flags, scheme, speed, foreign, foreign_decode, blocks, capacity, busy, _, under_way, since
      = unpack_from(ROW_PREFILL_TOKENS_TO_SINCE_MS, row, PREFILL_TOKENS_AT)
    local tokens = capacity * (sizes[scheme] or 0)
    if tokens > 0 and band(flags, ROUTABLE_MASK) == ROUTABLE then
      local share = (include "shared/busy_share")(busy, prefill > 0, since, now) / BUSY_ALWAYS
      local tps = speed > 0 and speed or UNKNOWN_SPEED
      if share >= BUSY and blocks >= FULL_SHARE * capacity then binds = true end
      any_capacity = min(any_capacity, tokens)
      engines[slot] = { worker = rows[i], tokens = tokens, context = decode + foreign_decode, busy = share,
        ahead_s = (prefill + foreign) / tps, gap = max(LEAST_GAP_MS, min(MOST_GAP_MS, tokens / tps * 1000)),
        taken = 0, own = 0, inside = 0, idle = {} }
    end
  end
  local state = ledger.state()
  local line = prefix .. "session_line"
  if binds then
    state.until_ms = now + BINDS_MS
  elseif not bound then
    return false
  elseif state.until_ms < now or state.until_ms > now + BINDS_MS then
    call("UNLINK", prefix .. "sessions", line, prefix .. "places")
    return false
  end

  -- Look at every session: count, and end what is over.
  local held, shared, tenants, inside, gap = {}, {}, {}, 0, 0
  local all = call("HGETALL", prefix .. "sessions")
  local every = math.ceil(#all / 2 / MOST_SAMPLES)
  for k = 1, #all, 2 do
    local sid, packed = all[k], all[k + 1]
    if #packed < SESSION_BYTES + 16 then
      ledger.drop(sid)
    else
      local first, since, in_ms, heard, slot, tokens, common, booked, _, _, running, place, _, traits, priority, at
        = unpack_from(SESSION, packed)
      local engine, idle_ms = engines[slot], max(0, now - since)
      if running > 0 and idle_ms > LEASE_CHECK_MS and call("HEXISTS", prefix .. "lease", sub(packed, at + 16)) == 0 then
        local r = ledger.read(sid)
        r.running, r.booked, running, booked = 0, 0, 0, 0
        ledger.write(sid, r)
      end
      if place == PLACE_IN then
        if heard > 0 and now - heard > UNHEARD_MS and running == 0 or not engine
            or running == 0 and heard == 0 and idle_ms > engine.gap then
          local r = ledger.read(sid)
          ledger.leaves(r, state)
          r.heard = 0
          ledger.write(sid, r)
        else
          local own = max(0, tokens - min(common, state.common))
          engine.taken, engine.inside, inside = engine.taken + own, engine.inside + 1, inside + 1
          engine.own = engine.own + booked
          tenants[sub(packed, at, at + 7)] = (tenants[sub(packed, at, at + 7)] or 0) + own
          if running == 0 then engine.idle[#engine.idle + 1] = { sid = sid, first = first, own = own } end
        end
      elseif place == PLACE_OUT then
        local agent = band(traits, TRAIT_PLACED + TRAIT_CALLED) ~= 0
        if running == 0 and idle_ms > (agent and AGENT_KEPT_MS or STRANGER_KEPT_MS) then
          if band(traits, TRAIT_JUDGED) == 0 and band(traits, TRAIT_STEPPED) ~= 0 then ledger.judge(ledger.read(sid), state, false) end
          ledger.drop(sid)
        end
      elseif now - heard > UNHEARD_MS then
        local r = ledger.read(sid)
        r.place, r.heard = PLACE_OUT, 0
        ledger.write(sid, r)
        call("ZREM", line, sid)
      else
        held[#held + 1] = sid
      end
      if (place ~= PLACE_OUT) and (k + 1) / 2 % every == 0 then shared[#shared + 1] = common end
    end
  end
  if #held ~= call("ZCARD", line) then -- Redis lost the line, or a part of the records
    call("DEL", line)
    for _, sid in ipairs(held) do call("ZADD", line, format("%.0f", ledger.stands(ledger.read(sid))), sid) end
  end
  table.sort(shared)
  state.common = shared[math.ceil(#shared / 4)] or 0
  state.inside, state.least = inside, any_capacity < huge and any_capacity / LEAST_SHARE or 0

  -- Pause the youngest idle sessions of engines whose sessions no longer fit.
  for slot, engine in pairs(engines) do
    gap = max(gap, engine.gap)
    engine.capacity = max(0, engine.tokens - state.common - max(0, engine.context - engine.own))
    engine.has_time = engine.busy < BUSY and engine.ahead_s < ENTERS_WAIT_S
    if engine.taken > engine.capacity and engine.busy >= BUSY then
      table.sort(engine.idle, function(p, q) return p.first > q.first or p.first == q.first and p.sid > q.sid end)
      for _, idle in ipairs(engine.idle) do
        if engine.taken <= engine.capacity then break end
        local r = ledger.read(idle.sid)
        r.place, r.in_ms = PLACE_OUT, 0
        ledger.write(idle.sid, r)
        engine.taken, engine.inside, state.inside = engine.taken - idle.own, engine.inside - 1, state.inside - 1
        local yields = prefix .. "yields:" .. engine.worker
        call("RPUSH", yields, r.reservation)
        call("LTRIM", yields, -YIELDS, -1)
        call("EXPIRE", yields, YIELDS_KEPT_S)
      end
    end
  end
  state.gap = gap > 0 and gap or state.gap

  -- Return the slot of the engine that may take this session: its own, else that with the most room; any: of all engines.
  local function entry(r, any)
    local own, best, most = ledger.own_tokens(r, state), nil, -huge
    for slot, engine in pairs(engines) do
      local room = ADMIT * engine.capacity - engine.taken - own
      local fits = room >= 0 or engine.inside == 0 or engine.has_time and engine.context + own <= engine.tokens
      if any or fits then
        if slot == r.slot and fits then return slot, own end
        if room > most or room == most and slot < best then best, most = slot, room end
      end
    end
    return best, own
  end

  local function let_in(sid, r, any)
    local slot, own = entry(r, any)
    if not slot then return false end
    local engine = engines[slot]
    if engine.taken + own > ADMIT * engine.capacity then engine.has_time = false end
    engine.taken, engine.inside, state.inside = engine.taken + own, engine.inside + 1, state.inside + 1
    ledger.enters(r)
    r.slot = slot
    ledger.write(sid, r)
    call("ZREM", line, sid)
    tenants[r.tenant] = (tenants[r.tenant] or 0) + own
    return true
  end

  -- Paused sessions come first, each class by first arrival; new ones from the tenant that has the fewest tokens.
  local fresh, blocked = {}, false
  for _, sid in ipairs(call("ZRANGE", line, 0, MOST_HELD - 1)) do
    local r = ledger.read(sid)
    if not r or r.place ~= PLACE_NEW and r.place ~= PLACE_PAUSED then
      call("ZREM", line, sid)
    elseif r.place == PLACE_PAUSED then
      local overdue = now - r.since >= constants.paused_max_ms
      if (overdue or not blocked) and not let_in(sid, r, overdue) then blocked = true end
    else
      fresh[#fresh + 1] = { sid = sid, r = r }
    end
  end
  while not blocked and fresh[1] do
    local at = 1
    for k = 2, #fresh do
      local p, q = fresh[k].r, fresh[at].r
      if p.priority == q.priority and (tenants[p.tenant] or 0) < (tenants[q.tenant] or 0) then at = k end
    end
    local chosen = table.remove(fresh, at)
    if not let_in(chosen.sid, chosen.r, false) then blocked = true end
  end
  call("DEL", prefix .. "places")
  for slot, engine in pairs(engines) do ledger.keep_engine(slot, engine.taken, engine.capacity, engine.has_time) end
  ledger.keep_state(state)
  return true
end
