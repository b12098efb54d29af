--[[
rights: tells which of the given commands the calling Redis user may not call.

Guarantee: calls none of the commands, only asks Redis for the user's rights. So a user that may run scripts learns its
           own rights without the right to call ACL DRYRUN, which tells those of any user.

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
