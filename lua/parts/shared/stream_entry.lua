--[[
shared/stream_entry: parses one entry of a worker's or a server's stream, alike for all scripts that apply.

Takes an item of XRANGE and the server's time in ms. Returns the time (ms) and the sequence of the entry's id; whether
the id is hostile (too far in the future or too large, so that Redis would refuse all later entries); and whether the
fields have the form n <nonce> b <number> o <operation> d <data>.
--]]

return function(item, now)
  local fields, ms, sequence = item[2], item[1]:match("^(%d+)-(%d+)$")
  ms, sequence = tonumber(ms), tonumber(sequence)
  local good = #fields == 8 and fields[1] == "n" and fields[3] == "b" and fields[5] == "o" and fields[7] == "d"
    and #fields[2] <= 64 and fields[2]:match("^[%w_-]+$") and #fields[4] <= 14 and fields[4]:match("^%d+$")
  return ms, sequence, ms > now + FAR_FUTURE_MS or sequence > LAST_SEQUENCE, good and true or false
end
