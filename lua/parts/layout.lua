--[[
layout: the constants that more than one file uses, and none but scripts. What routers know, too (rows, leases, flags,
codes), is declared in Python: app/warmfleet/fleet/layout.py says where, and how these names are formed. The loader puts
the values in place of the names, in every script.
--]]
-- luacheck: ignore 211

-- Numbers
local U32 = 2 ^ 32
local US = 1e6 -- in a second
local MINUTE_MS = 60000
local PAST_MS = 2 ^ 31 -- a difference of two times modulo 2^32 that is larger is of a time that is still to come

-- Which workers decisions may choose: those with all of these flags ...
local ROUTABLE = FLAG_SERVER + FLAG_URL
-- ... and none of the others in this mask, as long as they are not ejected
local ROUTABLE_MASK = ROUTABLE + FLAG_DRAINING + FLAG_HOSTILE + FLAG_PAUSED + FLAG_MISNAMED
local EJECTIONS_KEPT_MS = 600000 -- an ejection that was over for so long counts no more

-- Workers
local UNKNOWN_SPEED = 10000 -- tokens/s, while no speed in the fleet is known
local VLLM_BLOCK_TOKENS = 16 -- as vLLM does by default
local MAX_EVICTED = 65535 -- the largest number that a row can hold
local BUSY_ALWAYS = 65535 -- the busy_share of a row of an engine that computes prompts all the time
local BUSY_MEMORY_MS = 15000 -- in a worker's share of time in prefill older time counts less: shared/busy_share
local FULL_SHARE = 0.95 -- a cache is full from this share on
local GRACE_AFTER_MS = 2500 -- a tick that is older shows that heartbeats have waited unread

-- Streams
local SCHEMA = 1 -- of the announcements of workers and API servers
local FAR_FUTURE_MS = 3600000 -- a time so far ahead was not told by a clock
local LAST_SEQUENCE = 2 ^ 52 -- of an entry's id: numbers beyond are not exact

-- What the index holds of a worker (digest): the number of its blocks, and the sums of the halves of their hashes
local DIGEST_SUMS = ">I4I4I4"
local DIGEST_BYTES = 12
local HASH_HALVES = ">I4I4"

-- What a router prefers: the slot of a worker that lacks a preferred label, and the seconds that it costs more
local LABEL_PRICE = ">I4d"

-- Requests
local MAX_REAPED = 8 -- leases or tickets that a call gives back at most because they have expired
local CLIENT_AT = 26 -- of a reservation's id: the tag of a client with limits, behind the 25 characters of every id
local LIMITS = ">I4I4" -- of a client's key: requests in flight, tokens per minute; 0: no such limit
local LIMITS_BYTES = 8 -- one more: they have let this request in before

-- The queue. A flow is a priority class and a tenant, a place is a time in us as digits.
local FLOW_BYTES = 9
local PLACE_BYTES = 16
local MEMBER_ID_AT = FLOW_BYTES + PLACE_BYTES + 1 -- of a member of `queue2`: flow, place, id

-- A ticket's record
local TICKET_PRICES = ">I4I4I4I4B" -- prompt tokens; size, tie and price elsewhere (us); how many workers are named
local TICKET_SIZE = ">I4I4" -- of these the first two
local TICKET_TOKENS = ">I4" -- of these the first
local TICKET_FLOW_AT = 18 -- its flow
local TICKET_ARRIVAL_AT = TICKET_FLOW_AT + FLOW_BYTES -- when it came (us), as digits
local TICKET_PLACE_AT = TICKET_ARRIVAL_AT + PLACE_BYTES -- its place in its flow
local TICKET_OWN_AT = TICKET_PLACE_AT + PLACE_BYTES -- the named workers
local TICKET_OWN = ">I4I4" -- of each: its slot, and its price (us)
local OWN_BYTES = 8 -- of each
local BARRED_SLOT = ">I4" -- behind them: the slots of workers that cannot serve the request
local SLOT_BYTES = 4 -- of each
local MAKING = "\1" -- at the end, where a worker is making half of the prompt

local MAX_TURNS = 256 -- tickets that are looked at to find whose turn it is
local NO_ROOM_S = 1e-9 -- seconds of room that subtractions may leave over
