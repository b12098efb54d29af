--[[
shared/sessions: the ledger of sessions: which conversations of agents have a place, the right to keep their context in
an engine's cache.

Guarantee: a record that is too short counts as absent. Takes the key prefix, and a function to call Redis with (nil:
redis.call). Returns a table of functions:
  read(sid): the record as a table, by the names of SessionRecord in app/warmfleet/fleet/rows.py (those that end in _ms
    or _tokens without that ending); nil if there is none
  write(sid, record), drop(sid)
  state(), keep_state(state): read and write the numbers of the whole ledger:
    common    tokens with which most sessions begin, so that an engine has them once
    gap       ms in which an engine computes a whole cache: the longest time for which a place is kept without a request
    until_ms  time until which the ledger binds
    inside    number of sessions with a place
    pace      new sessions of the line that are let in per second, as a mean of some minutes
    shares    by KIND_, but for KIND_PLAIN: share of the sessions that turned out to be agents
  engines(): by slot: taken (tokens of the sessions in there), capacity (tokens that sessions may take), has_time (to
    compute contexts again); keep_engine(slot, taken, capacity, has_time)
  is_agent(record, state): whether the session waits for tools, not for a person
  judge(record, state, hit): the kind of the session learns from it, once, whether its sessions are agents
  stands(record): score of a held session in the line: priority class, paused before new, arrival
  own_tokens(record, state): tokens of its context beyond the common ones
  wait_ms(state, ahead): the wait of a session with so many before it
  enters(record), leaves(record): note that the session gets or gives up a place
Keys that depend on data: sessions, places
--]]
local pack, unpack_from, sub = struct.pack, struct.unpack, string.sub
local min, max, band, format = math.min, math.max, bit.band, string.format
local STATE, STATE_BYTES = ">ddddddd", 56
local ENGINE, ENGINE_BYTES = ">ddB", 17
local DEFAULT_GAP_MS = 20000
local LEARNS = 0.0625 -- weight of a session in the share of its kind
local LEAST_TOLD_MS, MOST_TOLD_MS = 20000, 86400000
local AGENT_SHARE = 0.5 -- share of a kind's sessions from which on its first requests count as agents'
local NEW_AFTER, CLASS_AFTER = 2 ^ 42, 2 ^ 43 -- in the line: distance of new sessions behind paused ones; of classes

return function(prefix, call)
  call = call or redis.call
  local sessions, places, ledger = prefix .. "sessions", prefix .. "places", {}

  function ledger.read(sid)
    local packed = call("HGET", sessions, sid)
    if not packed or #packed < SESSION_BYTES + SESSION_TEXTS then return nil end
    local first, since, heard, slot, tokens, shared, booked, gap, told, blocks, running, place, kind, traits,
      priority, at = unpack_from(SESSION, packed)
    return { first = first, since = since, heard = heard, slot = slot, tokens = tokens, shared = shared,
      booked = booked, gap = gap, told = told, blocks = blocks, running = running, place = place, kind = kind,
      traits = traits, priority = priority, tenant = sub(packed, at, at + 7), tail = sub(packed, at + 8, at + 15),
      reservation = sub(packed, at + 16) }
  end

  function ledger.write(sid, r)
    call("HSET", sessions, sid, pack(SESSION, r.first, r.since, r.heard, r.slot, r.tokens, r.shared, r.booked,
      r.gap, r.told, r.blocks, r.running, r.place, r.kind, r.traits, r.priority) .. r.tenant .. r.tail .. r.reservation)
  end

  function ledger.drop(sid) call("HDEL", sessions, sid) end

  function ledger.state()
    local packed = call("HGET", places, "")
    local common, gap, until_ms, inside, pace, tools, named = 0, DEFAULT_GAP_MS, 0, 0, 0, 1, 0
    if packed and #packed == STATE_BYTES then
      common, gap, until_ms, inside, pace, tools, named = unpack_from(STATE, packed)
    end
    return { common = common, gap = gap, until_ms = until_ms, inside = inside, pace = pace,
      shares = { [KIND_TOOLS] = tools, [KIND_NAMED] = named } }
  end

  function ledger.keep_state(state)
    local shares = state.shares
    call("HSET", places, "", pack(STATE, state.common, state.gap, state.until_ms, state.inside, state.pace,
      shares[KIND_TOOLS], shares[KIND_NAMED]))
  end

  function ledger.engines()
    local all, engines = call("HGETALL", places), {}
    for k = 1, #all, 2 do
      local slot = tonumber(all[k])
      if slot and #all[k + 1] >= ENGINE_BYTES then
        local taken, capacity, time = unpack_from(ENGINE, all[k + 1])
        engines[slot] = { taken = taken, capacity = capacity, has_time = time == 1 }
      end
    end
    return engines
  end

  function ledger.keep_engine(slot, taken, capacity, has_time)
    call("HSET", places, format("%d", slot), pack(ENGINE, taken, capacity, has_time and 1 or 0))
  end

  -- A first request without a name and tools may be a person's, so it never counts as an agent's.
  function ledger.is_agent(r, state)
    if band(r.traits, TRAIT_CALLED) ~= 0 then return true end
    if band(r.traits, TRAIT_STEPPED) ~= 0 then return r.gap > 0 and r.gap <= state.gap end
    return r.kind ~= KIND_PLAIN and state.shares[r.kind] >= AGENT_SHARE
  end

  function ledger.judge(r, state, hit)
    local share = state.shares[r.kind]
    if not share or band(r.traits, TRAIT_JUDGED) ~= 0 then return end
    r.traits = r.traits + TRAIT_JUDGED
    state.shares[r.kind] = share + LEARNS * ((hit and 1 or 0) - share)
    ledger.keep_state(state)
  end

  function ledger.stands(r) return r.priority * CLASS_AFTER + (r.place == PLACE_NEW and NEW_AFTER or 0) + r.first end

  function ledger.own_tokens(r, state) return max(0, r.tokens - min(r.shared, state.common)) end

  function ledger.wait_ms(state, ahead)
    local pace = state.pace > 0 and state.pace or max(1, state.inside) * FIRST_PACE
    return math.ceil(max(LEAST_TOLD_MS, min(MOST_TOLD_MS, (ahead + 1) / pace * 1000)))
  end

  function ledger.enters(r)
    r.place, r.traits = PLACE_IN, bit.bor(r.traits, TRAIT_PLACED)
  end

  function ledger.leaves(r) r.place, r.heard = PLACE_OUT, 0 end

  return ledger
end
