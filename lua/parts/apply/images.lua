--[[
apply/images: the operation `image`, by which an engine reports the tokens of an image that it has seen: JSON of the
image's identifier and its runs (a token id, how often it stands there, the next). Before each report stands what the
engine's API server announced to make of images, because replicas read only reports of engines with the pool's rules. A
report that is told again is moved to the end. The set is bounded, and a report ends a day after it was told last. A
worker brings a bounded number of new reports in the time in which engines tell again the images that they still see: so
none pushes out what the others use.

Takes the state of apply (short, record), the table of operations, to which it adds one, the keys of the reports and the
servers, the clock, and apply's functions that count, parse a list and check for integers.
--]]
local call = redis.call
local IMAGE_BYTES, ID_BYTES, MADE, MOST_IMAGES, KEPT_S = 4096, 1024, "^" .. ("%x"):rep(16) .. "$", 4096, 86400
local MOST_NEW, NEW_S = 1024, 300 -- NEW_S as AGAIN_SECONDS of the plugin

return function(state, operation, images_key, servers_key, clock, count, parse_list, integers)
  local known -- what this worker's server makes of images; false if it has announced nothing

  local function made()
    if known == nil then
      local server = cjson.decode(call("HGET", servers_key, state.record.server_id) or "{}")
      local facts = type(server.facts) == "table" and server.facts or {}
      local images = type(facts.images) == "table" and facts.images or {}
      known = type(images.made) == "string" and images.made:match(MADE) or false
    end
    return known
  end

  local function is_report(data)
    local told = #data <= IMAGE_BYTES and parse_list(data)
    if not told or #told ~= 2 then return false end
    local identifier, runs = told[1], told[2]
    return type(identifier) == "string" and #identifier > 0 and #identifier <= ID_BYTES
      and type(runs) == "table" and #runs > 0 and #runs % 2 == 0 and integers(runs, 1)
  end

  -- Counts a report that is not kept yet; returns whether this worker may bring one more now.
  local function has_room()
    local told_key = state.prefix .. "told_images:" .. state.worker
    local told = tonumber(call("GET", told_key) or "0")
    if told >= MOST_NEW then return false end
    if told == 0 then call("SET", told_key, 1, "EX", NEW_S) else call("SET", told_key, told + 1, "KEEPTTL") end
    return true
  end

  function operation.image(data)
    if not is_report(data) then return false end
    if state.short then return count("image_short") end
    if not made() then return end -- no router knows this engine's images
    local report = made() .. data
    if not call("ZSCORE", images_key, report) and not has_room() then return count("image_flood") end
    local now_us = clock[1] * 1000000 + clock[2]
    local last = call("ZRANGE", images_key, -1, -1, "WITHSCORES")[2]
    -- Scores only rise, though the clock may step back: replicas read what is behind the last score that they know.
    local score = math.max(now_us, (tonumber(last) or 0) + 1)
    call("ZADD", images_key, string.format("%.0f", score), report)
    call("ZREMRANGEBYSCORE", images_key, "-inf", string.format("%.0f", now_us - KEPT_S * 1000000))
    local over = call("ZCARD", images_key) - MOST_IMAGES
    if over > 0 then call("ZPOPMIN", images_key, over) end
    call("EXPIRE", images_key, KEPT_S)
  end
end
