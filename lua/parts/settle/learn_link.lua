--[[
settle/learn_link: learns how long a token's blocks take from one engine to another: key links, a HASH "slot:slot" ->
seconds per token.

A sample is the time from the end of the prefill at one engine to the first token at the other, with the other's queue,
its wait for room, and for the first transfers the handshake of the engines, which takes seconds. Decisions price queue
and room themselves. So the estimate follows the lower quarter of the samples, not their mean, and begins with the price
of an unknown link (decide/joint) at most: a link that took the blame for a full cache or a handshake would not be used
again, and so would never be learned anew.

Guarantee: O(1). The key has MAX_LINKS fields at most: the next one begins it anew, as it has slots of former engines.
It expires an hour after the last sample.
Takes the key prefix, the slots of both engines, the tokens that were moved, and the seconds.
--]]
local call, max, min, format = redis.call, math.max, math.min, string.format
local MAX_LINKS, LINKS_KEPT_S = 1024, 3600
local LEAST_MOVED = 2048 -- fewer tell more of the engine's steps than of the link
local UP, DOWN = 1.05, 0.864 -- steps that balance at three quarters above and a quarter below
local FASTEST_LINK, SLOWEST_LINK = 1e-8, 0.01 -- seconds per token

return function(prefix, from, to, tokens, seconds)
  if tokens < LEAST_MOVED or seconds <= 0 then return end
  local key, field, sample = prefix .. "links", format("%d:%d", from, to), seconds / tokens
  local known = tonumber(call("HGET", key, field) or nil)
  if not known and call("HLEN", key) >= MAX_LINKS then call("UNLINK", key) end
  local median = known and 0 or tonumber(string.match(call("GET", prefix .. "tick") or "", "^%d+ %d+ (%d+)") or 0)
  local first = min(sample, LINK_GUESS / (median > 0 and median or UNKNOWN_SPEED))
  local learned = known and known * (sample > known and UP or DOWN) or first
  call("HSET", key, field, format("%.4g", max(FASTEST_LINK, min(learned, SLOWEST_LINK))))
  call("EXPIRE", key, LINKS_KEPT_S)
end
