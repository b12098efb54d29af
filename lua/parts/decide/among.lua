--[[
decide/among: narrows a decision to given workers, such as those that a gateway lets its request go to.

Guarantee: pure. Takes every load row, the ids to choose among, and the ids of workers that can never serve the request
(both joined by commas). Returns the rows of the former, and the latter with every other worker, so that a ticket waits
for none of them.
--]]
return function(all, only, barred)
  local wanted, rows, others = {}, {}, { barred ~= "" and barred or nil }
  for id in only:gmatch("[^,]+") do wanted[id] = true end
  for k = 1, #all do
    local id = all[k]:sub(WORKER_ID_AT)
    if wanted[id] then rows[#rows + 1] = all[k] else others[#others + 1] = id end
  end
  return rows, table.concat(others, ",")
end
