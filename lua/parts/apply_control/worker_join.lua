--[[
apply_control/worker_join: checks the announcement of a worker (one vLLM engine core) and makes its record.

Takes the decoded data of the join, the worker's id and the known kinds of further sets of blocks. Returns the record,
with known fields only; or nil if a field of the announcement is malformed. Malformed labels, step_tokens, further sets
of blocks and transfers (protocol/transfer.py, which checks their texts) are left out: they are no reason to refuse a
worker.
--]]
local U31 = 2 ^ 31 - 1
local MAX_LABELS, MAX_WORD_BYTES = 8, 63

local function integer(value, low, high)
  return type(value) == "number" and value >= low and value <= high and value == math.floor(value)
end

local function labels(told)
  local count = 0
  for name, value in pairs(type(told) == "table" and told or {}) do
    count = count + 1
    for _, word in ipairs({ name, value }) do
      if type(word) ~= "string" or #word > MAX_WORD_BYTES or not word:match("^[%w._-]+$") then return nil end
    end
  end
  return count > 0 and count <= MAX_LABELS and told or nil
end

local function transfer(told)
  if type(told) ~= "table" or type(told.same) ~= "table" then return nil end
  local fact = { same = told.same }
  for name, value in pairs(told.same) do
    if type(name) ~= "string" or type(value) ~= "string" then return nil end
  end
  for _, name in ipairs({ "role", "connector", "beside", "mode", "engine_id", "host" }) do
    if type(told[name]) ~= "string" then return nil end
    fact[name] = told[name]
  end
  for name, most in pairs({ port = U31, lease_s = U31, recomputes = 1, kin = U32 - 1 }) do
    if not integer(told[name], 0, most) then return nil end
    fact[name] = told[name]
  end
  return next(told.same) and fact
end

local function sets(told, kinds)
  local kept = {}
  for kind in pairs(type(told) == "table" and kinds or {}) do
    local set = told[kind]
    if type(set) == "table" then
      kept[kind] = {
        capacity_blocks = integer(set.capacity_blocks, 0, U31) and set.capacity_blocks or nil,
        bytes_per_token = integer(set.bytes_per_token, 0, U31) and set.bytes_per_token or nil,
        promises_all = integer(set.promises_all, 0, 1) and set.promises_all or nil,
        loads_last = kind ~= "ends" and integer(set.loads_last, 0, 1) and set.loads_last or nil,
        loads_dropped = kind ~= "ends" and integer(set.loads_dropped, 0, 1) and set.loads_dropped or nil,
        store = kind ~= "ends" and type(set.store) == "string" and set.store:match("^" .. ("%x"):rep(16) .. "$") or nil,
      }
    end
  end
  return next(kept) and kept
end

return function(join, worker_id, kinds)
  local scheme = join.scheme
  if join.schema ~= SCHEMA or join.worker_id ~= worker_id or type(join.server_id) ~= "string"
    or not integer(join.rank, 0, 65535)
    or join.server_id .. "." .. join.rank ~= worker_id or type(join.version) ~= "string" or type(scheme) ~= "table"
    or not integer(join.capacity_blocks, 0, U31) or not integer(join.max_model_len, 0, U31)
    or not integer(join.scheme_id, 0, U31) or not integer(scheme.block_tokens, 1, 4096)
    or scheme.hash_block_tokens ~= nil and not integer(scheme.hash_block_tokens, 1, 4096) then
    return nil
  end
  local kept = { block_tokens = scheme.block_tokens, hash_block_tokens = scheme.hash_block_tokens }
  for _, name in ipairs({ "algorithm", "none_hash", "extra_keys" }) do
    if type(scheme[name]) ~= "string" or not scheme[name]:match("^[%w_]+$") then return nil end
    kept[name] = scheme[name]
  end
  return {
    server_id = join.server_id, rank = join.rank, scheme = kept, scheme_id = join.scheme_id, proof = "pending",
    capacity_blocks = join.capacity_blocks, max_model_len = join.max_model_len, labels = labels(join.labels),
    version = join.version:gsub("[^%w._+-]", ""):sub(1, 64), closed = join.closed == true or join.closed == 1,
    step_tokens = integer(join.step_tokens, 1, U31) and join.step_tokens or nil,
    sets = sets(join.sets, kinds), ends = join.ends == 1 or nil, transfer = transfer(join.transfer),
  }
end
