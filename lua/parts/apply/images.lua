--[[
apply/images: the operation `image`, by which an engine reports the tokens of an image that it has seen: JSON of the
image's identifier and its runs (a token id, how often it stands there, the next). Replicas read the reports, and check
them; a report that is told again is moved to the end. The set is bounded, and a report ends a day after it was told
last.

Takes the state of apply (short), the table of operations, to which it adds one, the key of the reports and the clock.
--]]
local call = redis.call
local IMAGE_BYTES, MOST_IMAGES, KEPT_S = 4096, 4096, 86400

return function(state, operation, images_key, clock)
  function operation.image(data)
    if #data > IMAGE_BYTES or data:sub(1, 1) ~= "[" then return false end
    if state.short then return end
    local now_us = clock[1] * 1000000 + clock[2]
    local last = call("ZRANGE", images_key, -1, -1, "WITHSCORES")[2]
    -- Scores only rise, though the clock may step back: replicas read what is behind the last score that they know.
    local score = math.max(now_us, (tonumber(last) or 0) + 1)
    call("ZADD", images_key, string.format("%.0f", score), data)
    call("ZREMRANGEBYSCORE", images_key, "-inf", string.format("%.0f", now_us - KEPT_S * 1000000))
    local over = call("ZCARD", images_key) - MOST_IMAGES
    if over > 0 then call("ZPOPMIN", images_key, over) end
    call("EXPIRE", images_key, KEPT_S)
  end
end
