--[[
shared/misnamed: whether an engine lacks the name of its pool, so that a request for that would fail there.

Guarantee: pure. A name is that of a pool if it gives its tag: characters that a tag cannot have count as "-", and
slashes at the ends do not count (protocol/wire.tag_of).
Takes any key of the pool, the list of served names, and the facts of an API server (its adapters are among them; nil:
it has told none). Returns true or false; false where the names are not known.
--]]
local PARTS = "^wf:{([^#}]*)" -- of a key: the tag without the pool's number

return function(key, models, facts)
  local tag = key:match(PARTS)
  local function gives(name)
    return type(name) == "string"
      and name:gsub("[^%w._/-]", "-"):gsub("^/+", ""):gsub("/+$", ""):gsub("/", "~") == tag
  end
  if type(models) ~= "table" then return false end
  for _, name in ipairs(models) do if gives(name) then return false end end
  local adapters = type(facts) == "table" and facts.loras
  for name in pairs(type(adapters) == "table" and adapters or {}) do if gives(name) then return false end end
  return true
end
