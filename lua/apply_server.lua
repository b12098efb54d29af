--[[
apply_server: applies one API server's stream: join, heartbeat, leave. The server's workers are `<server_id>.<rank>`.

Guarantee: each entry is applied exactly once, as by apply. The latest join says who the server is. If another process
joins under the same name, the server's workers lose the flags URL and PROVEN, because no probe has reached it. A
join of the same process at the same URL only updates the record, such as the names that the server serves. Workers have
the flag SERVER while their server lives, and MISNAMED while it does not serve their pool's name. The counter
`announced` grows with each change of a server's record, so that replicas read the record again. A stream that breaks
the rules is deleted. So is that of a process whose join Redis has lost: finding no stream, the process joins again. A
server's `leave` sets `left` in the records of its workers, until the server or the worker joins.

ARGV: prefix, server_id, max_entries, ttl_ms
Returns: {entries that were applied, 1 if the stream may hold more entries, else 0}
Cost: O(max_entries + workers); a join of another process also O(its artifact chunks)
Keys that depend on data: server:<server_id>, artifact:<server_id>:<sha256>
--]]
local servers_key, workers_key, load_key, alive_servers_key, cursor_key, counts_key = unpack(KEYS)
local prefix, server_id, max_entries, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local stream = "server:" .. server_id
local stream_key, artifact_prefix = prefix .. stream, prefix .. "artifact:" .. server_id .. ":"
local OF_A_PROCESS = FLAG_URL + FLAG_PROVEN + FLAG_UNHEARD + FLAG_EJECTED + FLAG_TRIAL

local call = redis.call
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local raw = call("HGET", servers_key, server_id)
local record, rejoined, stranger = raw and cjson.decode(raw) or nil, false, false
local left -- whether the last `join` or `leave` in this page is a `leave`; nil: the page has neither

local entry_of, with_flags = include "shared/stream_entry", include "shared/with_flags"
local heard, misnamed = include "shared/heard", include "shared/misnamed"
local announced, chunks_of = include "apply_server/server_join"
local function count(name) call("HINCRBY", counts_key, name, 1) end

-- Change the flags of every worker of this server: patch(flags of its row, worker_id) returns the new flags.
local function each_worker(patch)
  for _, worker_id in ipairs(call("HKEYS", load_key)) do
    if worker_id:match("^(.*)%.%d+$") == server_id then
      local row = call("HGET", load_key, worker_id)
      local flags = struct.unpack(ROW_FLAGS, row, FLAGS_AT)
      call("HSET", load_key, worker_id, with_flags(row, patch(flags, worker_id)))
    end
  end
end

local function join(data, nonce)
  local fresh = announced(data, server_id)
  if not fresh then return count("malformed") end
  -- Repeat the URL at the start of the text, because decide takes the first "url" in it, and `facts` may hold others.
  -- JSON parsers take the last of two equal keys: that of the join itself.
  local text, same = ('{"nonce":"%s","url":"%s",'):format(nonce, fresh.url) .. data:sub(2), false
  if record and record.nonce == nonce then
    if text == raw or record.url ~= fresh.url then return end -- a repeated join, or a URL that no probe has reached
    same = true
  end
  local kept = chunks_of(fresh.artifacts)
  for sha256 in pairs(record and chunks_of(record.artifacts) or {}) do
    if not kept[sha256] then call("UNLINK", artifact_prefix .. sha256) end
  end
  call("HSET", servers_key, server_id, text)
  count("announced")
  fresh.nonce, record, raw, rejoined = nonce, fresh, text, rejoined or not same
end

-- Applies one entry; returns true if the entry shows that the server lives, false if the server leaves, else nil.
local function enter(fields, good)
  local nonce, name = fields[2], fields[6]
  if not good then return count("malformed") end
  local lives = record and record.nonce == nonce and call("ZSCORE", alive_servers_key, server_id)
  if name == "join" then join(fields[8], nonce) end
  if record and record.nonce == nonce then
    if name == "join" and not lives then left = false end
    if name == "join" or name == "heartbeat" then return true end
    if name ~= "leave" then return count("malformed") end
    left = true
    return false
  elseif name ~= "join" then
    stranger = true
    count("nonce")
  end
end

call("ZREM", alive_servers_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
local kind = call("TYPE", stream_key).ok
local page = kind == "stream" and call("XRANGE", stream_key, "-", "+", "COUNT", max_entries) or {}
local entries, hostile, ms, sequence = 0, kind ~= "stream" and kind ~= "none", nil, nil
for _, item in ipairs(page) do
  local good
  ms, sequence, hostile, good = entry_of(item, now)
  if hostile then break end
  entries = entries + 1
  local lives = enter(item[2], good)
  if lives then call("ZADD", alive_servers_key, math.min(ms, now), server_id) end
  if lives == false then call("ZREM", alive_servers_key, server_id) end
end
if hostile then
  count("hostile")
  call("UNLINK", stream_key)
  call("ZREM", alive_servers_key, server_id)
elseif entries > 0 then
  call("XTRIM", stream_key, "MINID", string.format("%.0f-%.0f", ms, sequence + 1))
  call("HSET", cursor_key, stream, page[entries][1])
end
local more = not hostile and #page == max_entries and 1 or 0
local alive = heard(call("ZSCORE", alive_servers_key, server_id), now, ttl_ms)
if more == 0 and (not record or stranger and not alive) then -- Redis lost the join; finding no stream, the server joins
  call("UNLINK", stream_key)
  call("HDEL", cursor_key, stream)
  return { entries, 0 }
end

local names = (alive and FLAG_SERVER or 0)
  + (record and misnamed(load_key, record.models, record.facts) and FLAG_MISNAMED or 0)
each_worker(function(flags, worker_id)
  local worker = left ~= nil and call("HGET", workers_key, worker_id)
  if worker then
    worker = cjson.decode(worker)
    if rejoined then
      worker.proof, worker.cause, worker.reason, worker.suspect, worker.tries = "pending", nil, nil, nil, nil
    end
    worker.left = left or nil
    call("HSET", workers_key, worker_id, cjson.encode(worker))
  end
  if rejoined then flags = bit.band(flags, bit.bnot(OF_A_PROCESS)) end
  return bit.bor(bit.band(flags, bit.bnot(FLAG_SERVER + FLAG_MISNAMED)), names)
end)
return { entries, more }
