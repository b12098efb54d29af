--[[
shared/misnamed: tells whether an engine does not serve its pool's name, so that a request for that name would fail.

Guarantee: pure. A served name is the pool's if it turns into the pool's tag by the rule of protocol/wire.tag_of: each
character that a tag cannot have, of one or more bytes of UTF-8, becomes "-", and slashes at the ends are dropped. An
adapter, of which there may be thousands, is only looked up by the exact name.
Takes any key of the pool, the list of served names, and the facts of an API server (with its adapters; nil: unknown).
Returns true or false; false if the served names are not known.
--]]
local PARTS = "^wf:{([^#}]*)" -- matches the pool's tag in a key, without the pool's number

return function(key, models, facts)
  local tag = key:match(PARTS)
  local function gives(name)
    return type(name) == "string"
      and name:gsub("[^%w._/-][\128-\191]*", "-"):gsub("^/+", ""):gsub("/+$", ""):gsub("/", "~") == tag
  end
  if type(models) ~= "table" then return false end
  for _, name in ipairs(models) do if gives(name) then return false end end
  local adapters = type(facts) == "table" and facts.loras
  return type(adapters) ~= "table" or adapters[(tag:gsub("~", "/"))] == nil
end
