--[[
decide/prices: what a request that waits would cost at each worker, as its ticket keeps it.

A price is the time that a worker needs for what it does not hold of the prompt, and nothing else of what the cost rule
charges: those terms say which of the workers with room is best, but would let engines stand free. The eight lowest
prices are kept with the worker's name each, all other workers count like the cheapest of them: so a turn is found
without looking at every worker again. The lowest of all is the request's size. With another policy than `cost` every
worker is as good as any other.

Guarantee: pure. Takes the state of decide/prefix_match after the choice (decide/cost_rule). Returns the beginning of a
ticket's record (prompt tokens, size, tie and the others' price, in us, and the count of named workers), the named
workers as slot and price (us), the size in us, the prices in seconds by candidate, and whether a worker is making half
of the prompt or more at this moment.
--]]
local floor, max, min, pack = math.floor, math.max, math.min, struct.pack
local NAMED, MAX_US = 8, 4294967295

local function us(seconds) return floor(min(seconds * US, MAX_US) + 0.5) end

return function(s)
  local own, named, speed, matched, most, making = {}, {}, s.speed, s.matched, 0, 0
  for i, blocks in pairs(s.speculated) do
    making = max(making, matched[i] * (1 - (s.confirmed[i] or 0) / blocks)) -- the other blocks it has made already
  end
  for i = 1, s.count do
    own[i] = (s.prompt - (matched[i] or 0)) / speed[i]
    most = max(most, own[i])
    local k = #named
    if k <= NAMED or own[i] < own[named[k]] then
      if k <= NAMED then k = k + 1 end
      while k > 1 and own[named[k - 1]] > own[i] do
        named[k], k = named[k - 1], k - 1
      end
      named[k] = i
    end
  end
  local size = us(own[named[1]])
  if s.policy ~= "cost" then return pack(TICKET_PRICES, s.prompt, size, MAX_US, 0, 0), "", size, own, false end
  local rest = #named > NAMED and own[named[NAMED + 1]] or most
  local count, told = min(NAMED, #named), {}
  for k = 1, count do told[k] = pack(TICKET_OWN, s.slots[named[k]], us(own[named[k]])) end
  return pack(TICKET_PRICES, s.prompt, size, us(s.tie_s), us(rest), count), table.concat(told), size, own,
    2 * making >= s.prompt
end
