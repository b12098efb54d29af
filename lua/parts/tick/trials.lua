--[[
tick/trials: begins and ends the trials of ejected workers (eject), once a second.

Guarantee: an ejection whose time is over becomes a trial, and a trial without a verdict ends after TRIAL_MS. If other
workers die, ejected workers are readmitted, the one whose ejection would end first first, until at most half of the
living workers are ejected or on trial.

Takes the keys alive, load and ejections by name, the time in ms, ttl_ms, and whether it is a time of grace.
--]]
local call, band = redis.call, bit.band
local TRIAL_MS = 60000
local with_flags, heard = include "shared/with_flags", include "shared/heard"

return function(keys, now, ttl_ms, grace)
  local out, living, fields = {}, 0, call("HGETALL", keys.ejections_key)
  if not fields[1] then return end

  local function flags_of(row) return (struct.unpack(ROW_FLAGS, row, FLAGS_AT)) end
  local function lives(worker, flags)
    if band(flags, ROUTABLE_MASK) ~= ROUTABLE then return false end
    return grace or band(flags, FLAG_UNHEARD) ~= 0 or heard(call("ZSCORE", keys.alive_key, worker), now, ttl_ms)
  end
  local function set(worker, row, flags)
    call("HSET", keys.load_key, worker, with_flags(row, flags))
  end

  for i = 1, #fields, 2 do
    local worker, ends = fields[i], tonumber(fields[i + 1]:match("^%d+")) or 0
    local row = call("HGET", keys.load_key, worker)
    if not row or now - ends > EJECTIONS_KEPT_MS or ends > now + FAR_FUTURE_MS then
      call("HDEL", keys.ejections_key, worker)
      ends = 0
    end
    local flags = row and flags_of(row) or 0
    local rest = flags - band(flags, FLAG_EJECTED + FLAG_TRIAL)
    if band(flags, FLAG_EJECTED) ~= 0 and now >= ends then
      flags = ends > 0 and rest + FLAG_TRIAL or rest
      set(worker, row, flags)
    elseif flags ~= rest and now - ends > TRIAL_MS then
      flags = rest
      set(worker, row, flags)
    end
    if flags ~= rest and lives(worker, flags) then out[#out + 1] = { ends = ends, worker = worker, rest = rest } end
  end
  if not out[1] then return end
  local rows = call("HGETALL", keys.load_key)
  for i = 1, #rows, 2 do
    if lives(rows[i], flags_of(rows[i + 1])) then living = living + 1 end
  end
  table.sort(out, function(a, b) return a.ends < b.ends end)
  for k = 1, #out - math.floor(living / 2) do
    set(out[k].worker, call("HGET", keys.load_key, out[k].worker), out[k].rest)
  end
end
