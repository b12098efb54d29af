--[[
decide/prefill_leg: the reservation of the engine that computes a prompt for another, in a request that is split.

Its id is the request's with the mark PREFILL_LEG, up to a client's tag, because the client has one request. Its context
is the prompt's: the engine keeps the blocks until the other engine has taken them.
Takes the keys of load, leases and lease, the request's id, and a function from worker_id and flags to the URL. Returns
  known(): what an answer tells of the leg that was booked with this id before; empty: none
  book(s, w, reserve, prefix, now, expires_ms): books the leg at a candidate; returns what the answer tells of it
--]]
local call, unpack_from, sub, format = redis.call, struct.unpack, string.sub, string.format

return function(load_key, leases_key, lease_key, id, url_of)
  local leg = sub(id, 1, MARK_AT - 1) .. MARK_PREFILL_LEG .. sub(id, MARK_AT + 1, CLIENT_AT - 1)

  local function known()
    local lease = call("HGET", lease_key, leg)
    if not lease or lease:byte(LEASE_STAGE_AT) > STAGE_STARTED then return "" end
    local _, _, prefill, context, own, _, _, length, at = unpack_from(LEASE, lease)
    local worker = sub(lease, at, at + length - 1)
    local flags = unpack_from(ROW_FLAGS, call("HGET", load_key, worker) or ("\0"):rep(ROW_BYTES), FLAGS_AT)
    return { worker, url_of(worker, flags), own % JUDGED, 0, 0, prefill, context, flags, "" }
  end

  local function book(s, w, reserve, prefix, now, expires_ms)
    local before = call("HGET", lease_key, leg)
    if before then -- of an earlier decision for this id, whose other leg has ended
      local release = (include "shared/release_lease")(load_key, leases_key, lease_key, prefix, now)
      release.forget(leg)
      release.load(before)
      release.speculation(leg, before)
    end
    local row = before and call("HGET", load_key, sub(s.rows[w], WORKER_ID_AT))
    if row then s.rows[w] = row end
    local prefill, context = reserve(s, w, load_key, leases_key, lease_key, prefix, leg, s.prompt, expires_ms)
    local worker, flags, tiers = sub(s.rows[w], WORKER_ID_AT), unpack_from(ROW_FLAGS, s.rows[w], FLAGS_AT), s.tiers
    local loads = tiers and tiers.tokens[w]
    return { worker, url_of(worker, flags), s.matched[w] or 0, s.speculated[w] and 1 or 0, s.wait[w], prefill, context,
      flags, loads and format("%d %.6f %d", loads, tiers.seconds[w], tiers.kind[w]) or "" }
  end

  return known, book
end
