--[[
decide/baseline_policies: the policies besides `cost`; lua/README.md tables their rules and sources.

Guarantee: pure. Of candidates that a policy ranks equal the one with the fewest requests in flight is taken, of these
the one with the lowest hash of seed and slot. Takes the state (see decide/cost_rule), the useful tokens of each match,
and two functions of decide/cost_rule: first_in_order(s, passes) and draw(s, candidate).
Returns the candidate and one word why.
--]]
local unpack_from, sub, max, min, floor = struct.unpack, string.sub, math.max, math.min, math.floor
local FULL_RANK = 2 ^ 40

return function(s, own, first_in_order, draw)
  local function in_flight(i) return (unpack_from(ROW_IN_FLIGHT, s.rows[i], IN_FLIGHT_AT)) end
  local function waiting(i) return s.wait[i] end

  -- Count blocks that a worker holds or will hold. Nearly full caches rank equal: a few free blocks make no difference.
  local function blocks(i)
    local held, capacity = unpack_from(ROW_BLOCKS_TO_CAPACITY_BLOCKS, s.rows[i], BLOCKS_AT)
    held = held + floor(s.wait[i] / (s.block > 1 and s.block or VLLM_BLOCK_TOKENS))
    return capacity > 0 and held >= FULL_SHARE * capacity and FULL_RANK or held
  end

  -- Return the candidates of the lowest rank among those in `passes` (nil: among all), as a set, and that rank.
  local function least_of(rank, passes)
    local lowest, found = math.huge, {}
    for i = 1, s.count do
      if not passes or passes[i] then
        local ranked = rank(i)
        if ranked < lowest then lowest, found = ranked, {} end
        if ranked == lowest then found[i] = true end
      end
    end
    return found, lowest
  end

  local function drawn(passes) return (next((least_of(function(i) return draw(s, i) end, passes)))) end

  -- Return the candidate of the lowest rank, of equals as the header says.
  local function least(rank, passes) return drawn((least_of(in_flight, (least_of(rank, passes))))) end

  -- Return the candidates of the deepest match, and its share of the prompt, less the tokens that all candidates hold.
  local function deepest()
    local found, best = least_of(function(i) return -(own[i] or 0) end)
    local _, common = least_of(function(i) return own[i] or 0 end)
    return found, (-best - common) / max(1, s.prompt - common)
  end

  -- Return the largest number of requests in flight less the smallest, of all candidates; and both numbers.
  local function spread()
    local _, lowest = least_of(in_flight)
    local _, highest = least_of(function(i) return -in_flight(i) end)
    return -highest - lowest, -highest, lowest
  end

  local policies = {}

  function policies.random() return drawn(), "seed" end

  function policies.least_loaded() return least(waiting), "lowest" end

  function policies.power_of_two()
    local one = drawn()
    local others = {}
    for i = 1, s.count do others[i] = i ~= one or s.count == 1 end
    local two = drawn(others)
    return in_flight(two) < in_flight(one) and two or one, "lowest"
  end

  function policies.round_robin()
    local turn = {}
    for i = 1, s.count do turn[i] = i end
    table.sort(turn, function(p, q) return sub(s.rows[p], WORKER_ID_AT) < sub(s.rows[q], WORKER_ID_AT) end)
    return turn[s.turn % s.count + 1], "turn"
  end

  function policies.session()
    local home = first_in_order(s)
    if home then return home, "home" end
    return policies.least_loaded()
  end

  -- The number of first tokens is cut to full blocks, because the index knows only full blocks.
  function policies.sticky()
    local tokens = min(s.prefix_tokens > 0 and s.prefix_tokens or 64, s.prompt - 1)
    tokens = max(s.block, floor(tokens / s.block) * s.block)
    local holders = {}
    for i = 1, s.count do holders[i] = (s.matched[i] or 0) >= tokens or nil end
    if next(holders) then return least(in_flight, holders), "match" end
    return least(in_flight), "lowest"
  end

  function policies.two_state()
    local difference, highest, lowest = spread()
    if difference > 64 and highest > 1.5 * lowest then return least(in_flight), "imbalance" end
    local holders, share = deepest()
    if share >= 0.3 then return least(in_flight, holders), "match" end
    return least(blocks), "smallest"
  end

  function policies.prefix_affinity()
    if spread() > 10 then return (policies.power_of_two()), "imbalance" end
    local holders, share = deepest()
    if share >= 0.1 then return least(in_flight, holders), "match" end
    return least(blocks), "smallest"
  end

  -- Choose by consistent hashing with bounded loads.
  function policies.chwbl()
    local total = 0
    for i = 1, s.count do total = total + in_flight(i) end
    local bound = 1.25 * (total + 1) / s.count
    local within = first_in_order(s, function(i) return in_flight(i) + 1 <= bound end)
    if within then return within, "bound" end
    local home = first_in_order(s)
    if home then return home, "home" end
    return least(in_flight), "lowest"
  end

  return policies[s.policy]()
end
