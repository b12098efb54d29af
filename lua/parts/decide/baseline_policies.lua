--[[
decide/baseline_policies: the policies besides cost; lua/README.md says where each comes from.

Guarantee: pure. Takes the state. Returns the candidate and one word why, as decide/cost_rule.
--]]
local unpack_from, sub, max, min, floor = struct.unpack, string.sub, math.max, math.min, math.floor
local mix, useful, first = include "decide/mix", include "decide/useful", include "decide/home"

local function in_flight(s, i) return (unpack_from(">i4", s.rows[i], 13)) end

-- What it holds and is about to; without a chain in blocks of vLLM's size. Caches that are full are equally small:
-- which of them lacks a few blocks says nothing.
local FULL = 2 ^ 40
local function blocks(s, i)
  local held, capacity = unpack_from(">I4I4", s.rows[i], 39)
  held = held + floor(s.wait[i] / (s.block > 1 and s.block or 16))
  return capacity > 0 and held >= 0.95 * capacity and FULL or held
end

local function waiting(s, i) return s.wait[i] end

-- Of the candidates that pass, those with the least rank; all pass without `passes`.
local function least_of(s, rank, passes)
  local lowest, found = math.huge, {}
  for i = 1, s.count do
    if not passes or passes[i] then
      local one = rank(s, i)
      if one < lowest then lowest, found = one, {} end
      if one == lowest then found[i] = true end
    end
  end
  return found, lowest
end

local function drawn(s, passes) return (next((least_of(s, mix, passes)))) end

-- The one of the least rank; then the least in flight, then a hash.
local function least(s, rank, passes)
  return drawn(s, (least_of(s, in_flight, (least_of(s, rank, passes)))))
end

-- The deepest of all, and its share of the prompt; what every candidate holds is left out of that.
local function deepest(s)
  local own = useful(s)
  local found, best = least_of(s, function(_, i) return -(own[i] or 0) end)
  local _, common = least_of(s, function(_, i) return own[i] or 0 end)
  return found, (-best - common) / max(1, s.prompt - common)
end

local function spread(s)
  local _, lowest = least_of(s, in_flight)
  local _, highest = least_of(s, function(_, i) return -in_flight(s, i) end)
  return -highest - lowest, -highest, lowest
end

local P = {}

function P.random(s) return drawn(s), "seed" end

function P.least_loaded(s) return least(s, waiting), "lowest" end

function P.power_of_two(s) -- of two at random the one with fewer in flight
  local one = drawn(s)
  local others = {}
  for i = 1, s.count do others[i] = i ~= one or s.count == 1 end
  local two = drawn(s, others)
  return in_flight(s, two) < in_flight(s, one) and two or one, "lowest"
end

function P.round_robin(s)
  local turn = {}
  for i = 1, s.count do turn[i] = i end
  table.sort(turn, function(p, q) return sub(s.rows[p], 59) < sub(s.rows[q], 59) end)
  return turn[s.turn % s.count + 1], "turn"
end

function P.session(s)
  local home = first(s)
  if home then return home, "home" end
  return P.least_loaded(s)
end

function P.sticky(s) -- full blocks are known only: L is cut to them
  local tokens = min(s.prefix_tokens > 0 and s.prefix_tokens or 64, s.prompt - 1)
  tokens = max(s.block, floor(tokens / s.block) * s.block)
  local holders = {}
  for i = 1, s.count do holders[i] = (s.matched[i] or 0) >= tokens or nil end
  if next(holders) then return least(s, in_flight, holders), "match" end
  return least(s, in_flight), "lowest"
end

function P.two_state(s)
  local difference, highest, lowest = spread(s)
  if difference > 64 and highest > 1.5 * lowest then return least(s, in_flight), "imbalance" end
  local holders, share = deepest(s)
  if share >= 0.3 then return least(s, in_flight, holders), "match" end
  return least(s, blocks), "smallest"
end

function P.prefix_affinity(s)
  if spread(s) > 10 then return (P.power_of_two(s)), "imbalance" end
  local holders, share = deepest(s)
  if share >= 0.1 then return least(s, in_flight, holders), "match" end
  return least(s, blocks), "smallest"
end

function P.chwbl(s)
  local total = 0
  for i = 1, s.count do total = total + in_flight(s, i) end
  local bound = 1.25 * (total + 1) / s.count
  local within = first(s, function(i) return in_flight(s, i) + 1 <= bound end)
  if within then return within, "bound" end
  local home = first(s)
  if home then return home, "home" end
  return least(s, in_flight), "lowest"
end

return function(s) return P[s.policy](s) end
