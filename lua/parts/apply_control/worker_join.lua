--[[
apply_control/worker_join: checks the announcement of a worker (one vLLM engine core) and makes its record.

Takes the decoded data of its join and the worker's name. Returns the record, of known fields only; or nil if anything
in the announcement is not as it must be.
--]]
local U31 = 2 ^ 31 - 1

local function integer(value, low, high)
  return type(value) == "number" and value >= low and value <= high and value == math.floor(value)
end

return function(join, worker_id)
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
    capacity_blocks = join.capacity_blocks, max_model_len = join.max_model_len,
    version = join.version:gsub("[^%w._+-]", ""):sub(1, 64), closed = join.closed == true or join.closed == 1,
  }
end
