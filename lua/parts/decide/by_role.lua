--[[
decide/by_role: leaves out workers that only compute prompts for others, if the request may not be split.

Guarantee: pure. Takes load rows, the roles (shared/constants), and the ids of workers that can never serve the request
(joined by commas). Returns the rows of the others, and the latter with every worker that was left out, so that a ticket
waits for none of them.
--]]
return function(rows, roles, barred)
  local kept, others = {}, { barred ~= "" and barred or nil }
  for _, row in ipairs(rows) do
    local role = roles[struct.unpack(ROW_SLOT, row, SLOT_AT)]
    if not role or role.alone then kept[#kept + 1] = row else others[#others + 1] = row:sub(WORKER_ID_AT) end
  end
  return kept, table.concat(others, ",")
end
