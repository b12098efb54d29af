--[[
apply_control/worker_join: is this what an engine core says that announces itself properly?

Takes what its join says and the worker's name. Gives the worker's record, with what is known only; or nil.
--]]
local SCHEMA, U31 = 1, 2 ^ 31 - 1

local function integer(value, low, high)
  return type(value) == "number" and value >= low and value <= high and value == math.floor(value)
end

return function(it, WORKER)
  local scheme = it.scheme
  if it.schema ~= SCHEMA or it.worker_id ~= WORKER or type(it.server_id) ~= "string" or not integer(it.rank, 0, 65535)
    or it.server_id .. "." .. it.rank ~= WORKER or type(it.version) ~= "string" or type(scheme) ~= "table"
    or not integer(it.capacity_blocks, 0, U31) or not integer(it.max_model_len, 0, U31)
    or not integer(it.scheme_id, 0, U31) or not integer(scheme.block_tokens, 1, 4096) then
    return nil
  end
  local kept = { block_tokens = scheme.block_tokens }
  for _, name in ipairs({ "algorithm", "none_hash", "extra_keys" }) do
    if type(scheme[name]) ~= "string" or not scheme[name]:match("^[%w_]+$") then return nil end
    kept[name] = scheme[name]
  end
  return {
    server_id = it.server_id, rank = it.rank, scheme = kept, scheme_id = it.scheme_id, proof = "pending",
    capacity_blocks = it.capacity_blocks, max_model_len = it.max_model_len,
    version = it.version:gsub("[^%w._+-]", ""):sub(1, 64), closed = it.closed == true or it.closed == 1,
  }
end
