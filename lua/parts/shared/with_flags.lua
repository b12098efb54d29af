--[[
shared/with_flags: a load row with other flags.

Guarantee: pure. Takes a packed row and the new flags. Returns the packed row.
--]]

return function(row, flags) return row:sub(1, FLAGS_AT - 1) .. struct.pack(ROW_FLAGS, flags) .. row:sub(AFTER_FLAGS) end
