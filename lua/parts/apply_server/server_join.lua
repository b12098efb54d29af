--[[
apply_server/server_join: checks the announcement of an API server.

Returns announced(data of the join, the server's id) -> the decoded announcement, or nil if it is malformed; and
chunks_of(artifacts) -> the names of the chunks in a manifest, as a set, or nil.
--]]
local MAX_JOIN_BYTES, MAX_URL_BYTES = 262144, 512
local MAX_MODELS, MAX_FILES, MAX_CHUNKS, MAX_BRACKETS = 256, 8, 2048, 500
local URL = '^https?://[^%s%c"\\<>\128-\255]+$'
local MAX_NUMBER_BYTES = 24 -- enough for every float that Python writes; some parsers refuse thousands of digits

local function text(value, pattern, bytes)
  return type(value) == "string" and #value <= bytes and value:match(pattern) ~= nil
end

-- Tell whether this is an object (keys "") or a list (keys 1); an empty table may be either.
local function holds(value, keys) return type(value) == "table" and type(next(value) or keys) == type(keys) end

-- Return the names of the artifact chunks of a manifest, as a set; nil if it is malformed.
local function chunks_of(artifacts)
  if type(artifacts) ~= "table" then return nil end
  local chunks, n, files = {}, 0, 0
  for name, file in pairs(artifacts) do
    files = files + 1
    if not text(name, "^[%w._-]+$", 64) or type(file) ~= "table" or not holds(file.chunks, 1)
      or not text(file.sha256, "^%x+$", 64) or type(file.bytes) ~= "number" or file.bytes < 0 or file.bytes % 1 > 0 then
      return nil
    end
    for _, sha256 in ipairs(file.chunks) do
      n = n + 1
      if not text(sha256, "^%x+$", 64) or n > MAX_CHUNKS then return nil end
      chunks[sha256] = true
    end
  end
  return files <= MAX_FILES and chunks or nil
end

-- Tell whether all JSON parsers read the text alike, because a join is stored unchanged: ASCII, no deep nesting, and
-- no number that only cjson reads.
local function plain(data)
  local bare = data:gsub("\\.", ""):gsub('"[^"]*"', "")
  for token in bare:gmatch("[^%[%]{}:,%s]+") do
    local number = (token:match("^%-?%d+$") or token:match("^%-?%d+%.%d+$")) and not token:match("^%-?0%d")
    if not number and token ~= "true" and token ~= "false" and token ~= "null" then return false end
    if number and #token > MAX_NUMBER_BYTES then return false end
  end
  local _, brackets = bare:gsub("[%[{]", "")
  return brackets <= MAX_BRACKETS and data:sub(1, 2) == '{"' and not data:find("[^\32-\126]")
end

local function announced(data, server_id)
  if #data > MAX_JOIN_BYTES or not plain(data) then return nil end
  local ok, join = pcall(cjson.decode, data)
  if not ok or join.schema ~= SCHEMA or join.server_id ~= server_id or join.nonce ~= nil then return nil end
  if not text(join.url, URL, MAX_URL_BYTES) or type(join.version) ~= "string" then return nil end
  if type(join.models) ~= "table" or #join.models < 1 or #join.models > MAX_MODELS then return nil end
  for _, model in ipairs(join.models) do if not text(model, "^[^%c]+$", 256) then return nil end end
  return holds(join.facts, "") and chunks_of(join.artifacts) and join or nil
end

return announced, chunks_of
