--[[
shared/misnamed: whether an engine does not serve its pool's name, so that a request for that name would fail there.

Guarantee: pure. A served name is that of a pool if it gives its tag: each character that a tag cannot have, of however
many bytes of UTF-8, counts as "-", and slashes at the ends do not count (protocol/wire.tag_of). Of adapters, of which
there may be thousands, one has the name itself.
Takes any key of the pool, the list of served names, and the facts of an API server (its adapters are among them; nil:
it has told none). Returns true or false; false where the names are not known.
--]]
local PARTS = "^wf:{([^#}]*)" -- finds in a key the tag without the pool's number

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
