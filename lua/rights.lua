--[[
rights: which of these commands this Redis user may not call.

Guarantee: calls none of them, Redis is asked about rights only. So a user that may run scripts learns its own rights
           without the right to ask for those of others (ACL DRYRUN).

ARGV: commands (their number), then per command: number of its words, the words: its name, and keys where it takes keys
Returns: {numbers of the commands that the user may not call, counted from 1}
Cost: O(commands), 1 us each
--]]
local commands = tonumber(ARGV[1])

local refused, at = {}, 2
for command = 1, commands do
  local last = at + tonumber(ARGV[at])
  if not redis.acl_check_cmd(unpack(ARGV, at + 1, last)) then
    refused[#refused + 1] = command
  end
  at = last + 1
end
return refused
