--[[
decide/session: finds the session of a request, and decides whether it has a place, gets one, or is held in the line.

decide calls it only while the ledger binds. A request of a session with a place goes to the engine that has the
session's context. A session of an agent without a place gets one if nobody stands in the line and some engine has room:
its sessions then take at most ADMIT of its capacity; or it has time to compute; or no session is in there. Else the
session is held. Requests of others than agents are never held and take no place.

A session without a name is known by its prompt: each prompt of a session contains the one before. So at waypoints
(depths of blocks in a geometric row) keys name the sessions whose prompts went through that block, and a session is the
request's if its last full block is in the request's chain. Of several the one without a request under way is taken.
(One whose lease is gone is not under way: a decision whose answer was lost is settled without its session.) If all have
one, or if the request has another name, the request is a fork: it gets a session of its own, with the arrival
of its parent and all that is known of it. So a client that names each request anew gains nothing.

Takes the state after the choice of a worker, the choice, and the request: id, session (the argument of decide), tenant,
priority, tokens (of prompt and answer), chain (position in ARGV), prefix, leases_key, came_ms (time with fractions),
dry (nothing is written).
Returns the answer HELD; or nil, the candidate to take, and a function: to be called without arguments if the request
must wait for a turn, and once it is booked with the candidate and the tokens booked there; it returns the session's id.
Cost: 4 calls; 3 more for a new session, and one for each engine; 1 if a request is under way; 3 once it is booked
Keys that depend on data: sessions, session_line, places, way:<tenant><hash>
--]]
local sub, floor, max, band = string.sub, math.floor, math.max, bit.band
local log, format, min = math.log, string.format, math.min
local WAYPOINTS, PER_OCTAVE = 4, 2 -- deepest waypoints that are looked at; waypoints in a doubling of depth
local EXACT = 1e-9 -- makes up for rounding in powers of two
local MOST_ALIKE = 16 -- most sessions that a waypoint names, the latest
local LEAST_OWN = 2 -- blocks of a prompt beyond those of others from which on later prompts are known by it
local WAY_KEPT_MS = 600000
local SID_FROM, SID_TO, SID_BYTES = 5, 16, 13 -- characters of a reservation's id that name a session; length of ids
local LATE_S = 1 -- an engine that is overdue by this is not waited for
local READS = { GET = true, MGET = true, HGET = true, HGETALL = true, HLEN = true, ZCARD = true, ZCOUNT = true,
  ZRANK = true }

local function only_reads(command, ...) return READS[command] and redis.call(command, ...) end

return function(s, w, request)
  local prefix, tenant, id, now = request.prefix, request.tenant, request.id, s.now
  local call = request.dry and only_reads or redis.call
  local ledger = (include "shared/sessions")(prefix, call)
  local line, state = prefix .. "session_line", nil
  local flags, sid, hashes = request.session:byte(), sub(request.session, 2), ARGV[request.chain + 2] or ""
  local size, n = tonumber(ARGV[request.chain + 1]) or 1, floor(#hashes / 8)
  local kind = band(flags, HINT_TOOLS) ~= 0 and KIND_TOOLS or band(flags, HINT_NAMED) ~= 0 and KIND_NAMED or KIND_PLAIN
  local way, alike -- key of the deepest waypoint; the sessions that it names

  local function read(name)
    local r = ledger.read(name)
    if r and r.running == 1 then
      local lease = call("HGET", prefix .. "lease", r.reservation)
      if not lease or lease:byte(LEASE_STAGE_AT) > STAGE_STARTED then r.running, r.booked = 0, 0 end
    end
    return r
  end

  local function block(depth) return sub(hashes, depth * 8 - 7, depth * 8) end

  -- Return the keys of the deepest waypoints, at most `most`, deepest first.
  local function waypoints(most)
    local keys, last, deepest = {}, nil, floor(log(n) / log(2) * PER_OCTAVE + EXACT)
    for k = 0, most - 1 do
      local depth = floor(2 ^ ((deepest - k) / PER_OCTAVE) + EXACT)
      if depth < 2 then break end
      if depth ~= last then keys[#keys + 1] = prefix .. "way:" .. tenant .. block(depth) end
      last = depth
    end
    return keys
  end

  local function contains(r) return r.blocks > 0 and r.blocks <= n and block(r.blocks) == r.tail end

  -- Look for a session whose last prompt this one contains. Returns id and record of one without a request under way,
  -- or nil, nil and the record of one with a request.
  local function recognise()
    local keys, seen, busy = waypoints(WAYPOINTS), {}, nil
    local ways = call("MGET", unpack(keys))
    way, alike = keys[1], ways[1] or ""
    for k = 1, #keys do
      local names = ways[k] or ""
      for at = #names - SID_BYTES + 1, 1, -SID_BYTES do
        local name = sub(names, at, at + SID_BYTES - 1)
        local r = not seen[name] and read(name)
        seen[name] = true
        if r and contains(r) then
          if r.running == 0 and r.heard == 0 then return name, r end
          busy = busy or r
        end
      end
    end
    return nil, nil, busy
  end

  local function new(parent)
    local shared = parent and parent.tokens or 0
    for i = 1, parent and 0 or s.count do shared = max(shared, s.matched[i] or 0) end
    return { first = parent and parent.first or request.came_ms, since = 0, heard = 0, slot = 0, tokens = 0,
      shared = shared, booked = 0, gap = parent and parent.gap or 0, told = 0, blocks = 0, running = 0,
      place = PLACE_OUT, kind = kind, traits = parent and parent.traits or 0, priority = 0, tenant = tenant,
      tail = ("\0"):rep(8), reservation = "" }
  end

  local function plain() return nil, w, function() return "" end end
  if #id < SID_TO or sid == "" and n < LEAST_OWN then return plain() end -- its next request would not be known
  local record, parent = sid ~= "" and read(sid), nil
  local is_new = false
  if record and record.running > 0 and band(flags, HINT_NAMED) ~= 0 and not contains(record) then
    sid, record = "", nil -- the name is that of several conversations
  end
  if not record then
    local name, found, busy
    if n >= 2 then name, found, busy = recognise() end
    parent = busy
    if sid == "" and found then sid, record = name, found else parent = found or busy end
  end
  local knows = record or parent or kind ~= KIND_PLAIN -- anything that may make it an agent's
  if knows then state = ledger.state() end
  if not record then
    if kind ~= KIND_PLAIN and call("HLEN", prefix .. "sessions") >= MAX_SESSIONS then return plain() end
    is_new, record = true, new(parent)
    sid = sid ~= "" and sid or "p" .. sub(id, SID_FROM, SID_TO)
  elseif record.running == 0 and record.heard == 0 and band(record.traits, TRAIT_STEPPED) ~= 0 then
    local gap = max(1, now - record.since)
    record.gap = record.gap == 0 and gap or floor((record.gap + gap) / 2)
    ledger.judge(record, state, gap <= state.gap or band(record.traits, TRAIT_CALLED) ~= 0)
  end
  record.priority = request.priority
  if record.running == 0 or request.tokens > record.tokens then record.tokens = request.tokens end

  local function note(i, booked)
    if i then
      record.slot, record.since, record.heard, record.reservation = s.slots[i], now, 0, id
      record.running, record.booked = record.running + 1, record.booked + booked
    else
      record.heard = now
    end
    if n > 0 then record.blocks, record.tail = n, block(n) end
    ledger.write(sid, record)
    if n >= 2 and (not is_new or n * size >= record.shared + LEAST_OWN * size) then
      way = way or waypoints(1)[1]
      alike = alike or call("GET", way) or ""
      local at = alike:find(sid, 1, true)
      if at then alike = sub(alike, 1, at - 1) .. sub(alike, at + SID_BYTES) end
      call("SET", way, sub(alike .. sid, -MOST_ALIKE * SID_BYTES), "PX", WAY_KEPT_MS)
    end
    return sid
  end

  if record.place == PLACE_IN then
    local _, overdue_s = (include "shared/room")(s, 0, s.constants.block_sizes)
    for i = 1, s.count do
      if s.slots[i] == record.slot and overdue_s(i) <= LATE_S then return nil, i, note end
    end
    return nil, w, note -- its engine is gone, stands still, or must not be chosen
  end
  local stands = record.place ~= PLACE_OUT
  if not knows or not ledger.is_agent(record, state) or is_new and band(flags, HINT_ENDS) ~= 0 then
    if stands then call("ZREM", line, sid) end
    record.place = PLACE_OUT
    return nil, w, note
  end

  -- Find the engine that the session may enter: of those with room the one that holds more than half of the prompt,
  -- else the one with the most room.
  -- takes: it enters, if there is one.
  local function entry(takes)
    local own, engines, best, most, holder = ledger.own_tokens(record, state), ledger.engines(), nil, -math.huge, nil
    local known = false
    for i = 1, s.count do
      local role = s.roles and s.roles[s.slots[i]]
      local engine = (not role or role.alone or role.takes ~= 0) and engines[s.slots[i]]
      local room = engine and ADMIT * engine.capacity - engine.taken - own
      known = known or engine
      if engine and (room >= 0 or engine.has_time or engine.taken == 0) then
        local held = s.matched[i] or 0
        if held * 2 > s.prompt and (not holder or held > s.matched[holder]) then holder = i end
        if room > most then best, most = i, room end
      end
    end
    local i = takes and (holder or best) or nil
    local engine = i and engines[s.slots[i]]
    if engine then
      engine.taken = engine.taken + own
      ledger.keep_engine(s.slots[i], engine.taken, engine.capacity,
        engine.has_time and engine.taken <= ADMIT * engine.capacity)
    end
    return i, known
  end

  local i, known = nil, true
  if not stands then
    local free = call("ZCARD", line) == 0
    i, known = entry(free)
  end
  if not known then return nil, w, note end -- none of these engines takes part in the ledger
  if i then
    record.slot = s.slots[i]
    ledger.enters(record)
    state.inside = state.inside + 1
    ledger.keep_state(state)
    return nil, i, note
  end
  call("ZREM", request.leases_key, id) -- the first write frees memory: a full Redis then allows the others
  if not stands then
    record.place, record.since = band(record.traits, TRAIT_PLACED) ~= 0 and PLACE_PAUSED or PLACE_NEW, now
  end
  local stands_at = format("%.2f", ledger.stands(record))
  call("ZADD", line, stands_at, sid)
  local ahead = call("ZRANK", line, sid) or call("ZCOUNT", line, "-inf", stands_at) -- no rank: nothing was written
  local is_paused, wait = record.place == PLACE_PAUSED, record.told
  if not stands then
    wait = ledger.wait_ms(state, ahead)
    if is_paused then
      wait = min(wait, s.constants.paused_max_ms)
    elseif state.pace <= 0 then -- before the pace is known, nobody is refused
      wait = min(wait, s.constants.held_max_ms)
    end
    record.told = min(wait, s.constants.held_max_ms + 1000) -- a replica refuses a new session that waits longer
  end
  note() -- a client that hangs up and asks again is known by its prompt
  return { "HELD", sid, ahead, call("ZCARD", line), wait, is_paused and 1 or 0 }
end
