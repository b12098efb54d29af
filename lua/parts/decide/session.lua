--[[
decide/session: finds the session of a request, and decides whether it has a place, gets one, or is held in the line.

decide calls it only while the ledger binds. A request of a session with a place goes to the engine that has the
session's context. A session of an agent without a place gets one if nobody stands in the line and some engine has room:
its sessions then take at most ADMIT of its capacity; or it has time to compute; or no session is in there. Else the
session is held. Requests of others than agents are never held and take no place.

A session without a name is known by its prompt: each prompt of a session contains the one before. So at waypoints
(depths of blocks in a geometric row) keys name the sessions whose prompts went through that block, and a session is the
request's if its last full block is in the request's chain. Of several the one without a request under way is taken; if
all have one, or if the request has another name, the request is a fork: it gets a session of its own, with the arrival
of its parent and all that is known of it. So a client that names each request anew gains nothing.

Takes the state after the choice of a worker, the choice, and the request: id, session (the argument of decide), tenant,
priority, tokens (of prompt and answer), chain (position in ARGV), prefix, leases_key.
Returns the answer HELD; or nil, the candidate to take, its word why (nil: as chosen), and a function to call once the
request is booked, with the candidate and the tokens booked there, which returns the session's id.
Cost: 3 calls, a call for each new session or change of the line, 2 once it is booked
Keys that depend on data: sessions, session_line, places, way:<tenant><hash>
--]]
local call, sub, floor, max, min, band = redis.call, string.sub, math.floor, math.max, math.min, bit.band
local log, format = math.log, string.format
local WAYPOINTS = 8 -- deepest waypoints that are looked at: down to a quarter of the prompt
local PER_OCTAVE = 4 -- waypoints in a doubling of depth
local MOST_ALIKE = 16 -- most sessions that a waypoint names; a block with so many is shared by all
local MAX_SESSIONS = 4096
local WAY_KEPT_MS = 600000
local SID_FROM, SID_TO = 5, 16 -- the characters of a reservation's id that name a new session
local SID_BYTES = 13 -- length of each session's id
local LEAST_OWN = 2 -- blocks of a prompt beyond those of others from which on later prompts are known by it
local EXACT = 1e-9 -- makes up for rounding in powers of two
local LATE_S = 1 -- an engine that is overdue by this is not waited for

return function(s, w, request)
  local prefix, tenant, now = request.prefix, request.tenant, s.now
  local ledger = (include "shared/sessions")(prefix, now)
  local state = ledger.state()
  local flags, sid, hashes = request.session:byte(), sub(request.session, 2), ARGV[request.chain + 2] or ""
  local size, n = tonumber(ARGV[request.chain + 1]) or 1, floor(#hashes / 8)
  local named = band(flags, HINT_NAMED) ~= 0
  local kind = band(flags, HINT_TOOLS) ~= 0 and KIND_TOOLS or named and KIND_NAMED or KIND_PLAIN
  local record, parent, way, alike -- way: key of the deepest waypoint; alike: the sessions that it names
  local function none() return "" end
  if kind == KIND_PLAIN and s.prompt < state.least then return nil, w, nil, none end

  local function block(depth) return sub(hashes, depth * 8 - 7, depth * 8) end
  local function contains(r) return r.blocks > 0 and r.blocks <= n and block(r.blocks) == r.tail end

  -- Return the keys of the deepest waypoints, at most `most`, deepest first.
  local function waypoints(most)
    local keys, last = {}, nil
    for k = 0, most - 1 do
      local depth = floor(2 ^ ((floor(log(n) / log(2) * PER_OCTAVE + EXACT) - k) / PER_OCTAVE) + EXACT)
      if depth < 2 then break end
      if depth ~= last then keys[#keys + 1] = prefix .. "way:" .. tenant .. block(depth) end
      last = depth
    end
    return keys
  end

  -- Look for a session whose last prompt this one contains.
  local function recognise()
    local keys = waypoints(WAYPOINTS)
    local ways, seen = call("MGET", unpack(keys)), {}
    way, alike = keys[1], ways[1] or ""
    for k = 1, #keys do
      local names = ways[k]
      if names then
        for at = #names - SID_BYTES + 1, 1, -SID_BYTES do
          local name = sub(names, at, at + SID_BYTES - 1)
          if not seen[name] then
            seen[name] = true
            local r = ledger.read(name)
            if r and contains(r) then
              if r.running == 0 then return name, r end
              parent = parent or r
            end
          end
        end
      end
    end
  end

  if sid ~= "" then record = ledger.read(sid) end
  if not record and n >= 2 then
    local name, found = recognise()
    if sid == "" and found then sid, record = name, found else parent = parent or found end
  end
  local is_new = not record
  if is_new then
    if call("HLEN", prefix .. "sessions") >= MAX_SESSIONS then return nil, w, nil, none end
    if sid == "" then sid = "p" .. sub(request.id, SID_FROM, SID_TO) end
    local shared = 0
    for i = 1, s.count do shared = max(shared, s.matched[i] or 0) end
    record = { first = now, since = 0, in_ms = 0, heard = 0, slot = 0, tokens = 0, shared = shared, booked = 0, gap = 0,
      blocks = 0, running = 0, place = PLACE_OUT, kind = kind, traits = 0, priority = 0, tenant = tenant, tail = ("\0"):rep(8),
      reservation = "" }
    if parent then
      record.first, record.shared, record.gap, record.traits = parent.first, parent.tokens, parent.gap, parent.traits
    end
  elseif record.running == 0 and record.since > 0 and band(record.traits, TRAIT_STEPPED) ~= 0
    and (record.place == PLACE_OUT or record.place == PLACE_IN) and record.heard == 0 then
    local gap = max(1, now - record.since)
    record.gap = record.gap == 0 and gap or floor((record.gap + gap) / 2)
    if ledger.is_agent(record, state) then ledger.came_back(state, gap) end
    ledger.judge(record, state, gap <= state.gap or band(record.traits, TRAIT_CALLED) ~= 0)
  end
  record.priority = request.priority
  if record.running == 0 or request.tokens > record.tokens then record.tokens = request.tokens end

  -- Return the function that notes the session once its request is booked.
  local function booking()
    return function(i, booked)
      local slot = s.slots[i]
      record.slot, record.since, record.heard = slot, now, 0
      record.running, record.booked, record.reservation = record.running + 1, record.booked + booked, sub(request.id, 1, 25)
      if n > 0 then record.blocks, record.tail = n, block(n) end
      ledger.write(sid, record)
      if n >= 2 and (not is_new or n * size >= record.shared + LEAST_OWN * size) then
        if not way then
          way = waypoints(1)[1]
          alike = call("GET", way) or ""
        end
        local at = alike:find(sid, 1, true)
        if at then alike = sub(alike, 1, at - 1) .. sub(alike, at + SID_BYTES) end
        call("SET", way, sub(alike .. sid, -MOST_ALIKE * SID_BYTES), "PX", WAY_KEPT_MS)
      end
      return sid
    end
  end

  if record.place == PLACE_IN then
    local _, overdue_s = (include "shared/room")(s, 0, s.constants.block_sizes)
    for i = 1, s.count do
      if s.slots[i] == record.slot then
        if overdue_s(i) > LATE_S then break end
        return nil, i, i ~= w and "place" or nil, booking()
      end
    end
    record.place = PLACE_OUT -- its engine is gone, or must not be chosen
  end
  if not ledger.is_agent(record, state) or is_new and band(flags, HINT_ENDS) ~= 0 then
    if record.place == PLACE_NEW or record.place == PLACE_PAUSED then call("ZREM", prefix .. "session_line", sid) end
    record.place = PLACE_OUT
    return nil, w, nil, booking()
  end

  -- Find the engine that the session may enter: the one that holds more than half of the prompt, else that with the most room.
  local function entry()
    local own, best, most, holder = ledger.own_tokens(record, state), nil, -math.huge, nil
    for i = 1, s.count do
      local taken, capacity, has_time = ledger.engine(s.slots[i])
      local room = taken and ADMIT * capacity - taken - own or math.huge
      if room >= 0 or has_time or taken == 0 then
        if (s.matched[i] or 0) * 2 > s.prompt and (not holder or s.matched[i] > s.matched[holder]) then holder = i end
        if room > most then best, most = i, room end
      end
    end
    local i = holder or best
    if i then
      local taken, capacity, has_time = ledger.engine(s.slots[i])
      if taken then ledger.keep_engine(s.slots[i], taken + own, capacity, has_time and taken + own <= ADMIT * capacity) end
    end
    return i
  end

  local line = prefix .. "session_line"
  local stands = record.place == PLACE_NEW or record.place == PLACE_PAUSED
  local i = not stands and call("ZCARD", line) == 0 and entry()
  if i then
    ledger.enters(record)
    return nil, i, i ~= w and "place" or nil, booking()
  end
  call("ZREM", request.leases_key, request.id) -- the first write frees memory: a full Redis then allows the others
  if not stands then
    record.place = band(record.traits, TRAIT_PLACED) ~= 0 and PLACE_PAUSED or PLACE_NEW
    record.since = now
  end
  record.heard = now
  ledger.write(sid, record)
  call("ZADD", line, format("%.0f", ledger.stands(record)), sid)
  local ahead = call("ZRANK", line, sid)
  return { "HELD", sid, ahead, call("ZCARD", line), ledger.wait_ms(state, ahead),
    record.place == PLACE_PAUSED and 1 or 0 }
end
