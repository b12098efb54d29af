--[[
layout: the constants that more than one file uses, and none but scripts. What routers know, too (rows, leases, flags,
codes), is declared in Python: app/warmfleet/fleet/layout.py says where, and how these names are formed. The loader puts
the values in place of the names, in every script.
--]]
-- luacheck: ignore 211

-- Numbers
local U32 = 2 ^ 32
local US = 1e6 -- microseconds in a second
local MINUTE_MS = 60000
local PAST_MS = 2 ^ 31 -- a larger difference of two times modulo 2^32 means a time in the future

-- Decisions may choose workers with all of these flags ...
local ROUTABLE = FLAG_SERVER + FLAG_URL
-- ... and none of the others in this mask, as long as they are not ejected
local ROUTABLE_MASK = ROUTABLE + FLAG_DRAINING + FLAG_HOSTILE + FLAG_PAUSED + FLAG_MISNAMED
local EJECTIONS_KEPT_MS = 600000 -- time after an ejection's end during which it still counts

-- Workers
local UNKNOWN_SPEED = 10000 -- tokens/s, while no speed in the fleet is known
local VLLM_BLOCK_TOKENS = 16 -- the block size of vLLM by default
local MAX_EVICTED = 65535 -- the largest number that a row can hold
local BUSY_ALWAYS = 65535 -- the busy_share of a row of an engine that computes prompts all the time
local BUSY_MEMORY_MS = 15000 -- time constant of the mean of a worker's share of time in prefill (shared/busy_share)
local FULL_SHARE = 0.95 -- share of a cache from which on it counts as full
local GRACE_AFTER_MS = 2500 -- age from which on the last tick shows that heartbeats have waited unread

-- Streams
local SCHEMA = 1 -- the version of the announcements of workers and API servers
local FAR_FUTURE_MS = 3600000 -- time ahead from which on an entry's id cannot come from a working clock
local LAST_SEQUENCE = 2 ^ 52 -- the largest exact sequence number of an entry's id

-- The digest of a worker's blocks in the index: the number of its blocks, and the sums of the halves of their hashes
local DIGEST_SUMS = ">I4I4I4"
local DIGEST_BYTES = 12
local HASH_HALVES = ">I4I4"

-- A price of a preferred label: the slot of a worker that lacks a preferred label, and the seconds that it costs more
local LABEL_PRICE = ">I4d"

-- Requests
local MAX_REAPED = 8 -- most expired leases or tickets that a call gives back
local CLIENT_AT = 26 -- the position of a limited client's tag in a reservation's id, behind 25 characters
local LIMITS = ">I4I4" -- a client's limits: requests in flight, tokens per minute; 0: no such limit
local LIMITS_BYTES = 8 -- a ninth byte marks a request that the limits have let in before

-- The queue (shared/tickets). A flow is a priority class and a tenant; a place is a time in us as digits, the order.
local FLOW_BYTES = 9
local PLACE_BYTES = 16
local MEMBER_ID_AT = FLOW_BYTES + PLACE_BYTES + 1 -- the position of the id in a member of `queue2`: flow, place, id

-- A ticket's record
local TICKET_PRICES = ">I4I4I4I4B" -- prompt tokens; size, tie and price elsewhere (us); how many workers are named
local TICKET_SIZE = ">I4I4" -- the first two of these numbers, where the others are not needed
local TICKET_TOKENS = ">I4" -- the first of these numbers
local TICKET_FLOW_AT = 18 -- the position of the ticket's flow
local TICKET_ARRIVAL_AT = TICKET_FLOW_AT + FLOW_BYTES -- the position of its time of arrival (us), as digits
local TICKET_PLACE_AT = TICKET_ARRIVAL_AT + PLACE_BYTES -- the position of its place in its flow
local TICKET_OWN_AT = TICKET_PLACE_AT + PLACE_BYTES -- the position of the named workers
local TICKET_OWN = ">I4I4" -- a named worker's slot and price (us)
local OWN_BYTES = 8 -- length of the record of each named worker
local BARRED_SLOT = ">I4" -- behind the named workers: the slot of each worker that cannot serve the request
local SLOT_BYTES = 4 -- length of each such slot
local MAKING = "\1" -- the last byte of a ticket while a worker is making half of its prompt

local MAX_TURNS = 256 -- most tickets that are looked at to find whose turn it is
local NO_ROOM_S = 1e-9 -- seconds of room that count as none, as rounding may leave them over
