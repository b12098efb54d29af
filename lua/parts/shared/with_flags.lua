--[[
shared/with_flags: a load row with other flags.

Guarantee: pure. Takes a packed row and the new flags. Returns the packed row.
--]]
local FLAGS_AT, SCHEME_AT, ROW_FLAGS = 21, 23, ">I2" -- of a packed row; the scheme follows the flags

return function(row, flags) return row:sub(1, FLAGS_AT - 1) .. struct.pack(ROW_FLAGS, flags) .. row:sub(SCHEME_AT) end
