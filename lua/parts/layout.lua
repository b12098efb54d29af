--[[
layout: the constants that several scripts use and Python does not. Those that Python uses, too (rows, leases, flags,
codes), are declared there: app/warmfleet/fleet/layout.py says where, and how their names are formed. The loader puts
the values in place of the names, in every script.
--]]
-- luacheck: ignore 211

-- Numbers
local U32 = 2 ^ 32
local US = 1e6 -- microseconds in a second
local MINUTE_MS = 60000
local PAST_MS = 2 ^ 31 -- least difference (now - time, modulo 2^32) that means a time in the future

-- The flags that every routable worker has
local ROUTABLE = FLAG_SERVER + FLAG_URL
-- A worker is routable if it has of these flags exactly ROUTABLE, and is not ejected
local ROUTABLE_MASK = ROUTABLE + FLAG_DRAINING + FLAG_HOSTILE + FLAG_PAUSED + FLAG_MISNAMED
local EJECTIONS_KEPT_MS = 600000 -- time after an ejection's end during which it still counts

-- Workers
local UNKNOWN_SPEED = 10000 -- tokens/s, while no speed in the fleet is known
local LINK_GUESS = 0.5 -- of the time to compute a token: that to move its blocks over a link of which nothing is known
local VLLM_BLOCK_TOKENS = 16 -- the block size of vLLM by default
local MAX_EVICTED = 65535 -- the largest number of evicted blocks that a row can hold
local BUSY_ALWAYS = 65535 -- busy_share in the row of an engine that computes prompts all the time
local BUSY_MEMORY_MS = 15000 -- time constant of the mean of a worker's share of time in prefill (shared/busy_share)
local FULL_SHARE = 0.95 -- share of a cache from which on it counts as full
local GRACE_AFTER_MS = 2500 -- age of the last tick beyond which heartbeats have waited unread, so that grace begins

-- A load row from prefill_tokens to since_ms, as a decision reads it for each worker. Each value takes 12 ns, so fields
-- that are seldom needed are one number with a neighbour: in_flight and slot, flags and scheme, evicted and
-- under_way_tokens
local BRIEF_AT = PREFILL_TOKENS_AT
local ROW_BRIEF = ">i4i4i8I6I4I4I4I4I4I2I6I4"

local DECODE_TERM = 8 -- index of the term for answers among the terms of a cost (decide/cost_rule)

-- The reservations that an engine has (shared/running)
local BELIEVED_MS = 30000 -- time after an engine's last right tally during which leases that it has are extended
local EXTENDED_MS = 15000 -- time by which such a lease is extended when it is due
local RUNNING_AT_ONCE = 64 -- most reservations in an entry

-- Streams
local BATCH_BLOCKS = 128 -- most blocks in an entry of a worker's stream
local SCHEMA = 1 -- the version of the announcements of workers and API servers
local FAR_FUTURE_MS = 3600000 -- time ahead of the server's clock beyond which an entry's id is not believed
local LAST_SEQUENCE = 2 ^ 52 -- the largest sequence number of an entry's id with which Lua computes exactly

-- The digest of a worker's blocks in the index: the number of its blocks, and the sums of the halves of their hashes
local DIGEST_SUMS = ">I4I4I4"
local DIGEST_BYTES = 12
local HASH_HALVES = ">I4I4"

-- A further set of blocks: its slot, the slot of its worker's main set, seconds to load a token (of ends: 1 if a prompt
-- that is computed leaves one at each of its blocks, else 0), number of its kind
local FURTHER_SET = ">I4I4dB"
-- A tier as its worker reads it: the slot of the worker's main set, seconds to load a token, number of its kind, blocks
local TIER = ">I4dBI4"
local TIER_BYTES = 17
local KIND_OF_ENDS = 0 -- the number of the kind `ends`; those of tiers are larger
-- Added to the number of a tier's kind: its engine loads the last block of a prompt, too, behind which is no token; it
-- loads also the last cached block, which it would compute once more if only its GPU held it (EAGLE)
local LOADS_LAST = 128
local LOADS_DROPPED = 64

-- A label price: the slot of a worker that lacks a preferred label, and the seconds that its cost is raised by
local LABEL_PRICE = ">I4d"
-- An engine that hands prompts over: its slot, its class, the sum of classes that hand to it, 1 if it also serves alone
local HANDING = ">I4I4I4B"

-- Requests
local MAX_REAPED = 8 -- most expired leases or tickets that a call gives back
local MARK_AT = 4 -- the position of the mark in a reservation's id, behind wf-
local CLIENT_AT = 26 -- the position of a limited client's tag in a reservation's id, behind 25 characters
local LIMITS = ">I4I4" -- a client's limits: requests in flight, tokens per minute; 0: no such limit
local LIMITS_BYTES = 8 -- length of LIMITS; a ninth byte marks a request that was admitted before

-- The ledger of sessions (shared/sessions)
local ADMIT = 0.8 -- share of an engine's capacity up to which sessions are let in
local FIRST_PACE = 0.008 -- of the sessions in, those per second that end and let in others, until that is learned
local MAX_SESSIONS = 2048 -- most sessions in the ledger
local SESSION_TEXTS = 16 -- least bytes behind the numbers of a record: tenant and tail, before the reservation

-- The queue (shared/tickets). Flow: priority class and tenant. Place: time in us, as digits, that sorts tickets
local FLOW_BYTES = 9
local PLACE_BYTES = 16
local MEMBER_ID_AT = FLOW_BYTES + PLACE_BYTES + 1 -- the position of the id in a member of `queue2`: flow, place, id

-- A ticket's record. Price: us that a worker needs for what it lacks of the prompt, and that answers there lose, in
-- steps of PRICE_STEP; the remainder is the share of the former, in parts of PRICE_STEP - 1. Size: us to compute the
-- prompt at the worker that lacks least. Tie: us within which costs count as equal. Named workers: the 8 cheapest,
-- whose prices are stored one by one
local TICKET_PRICES = ">I4I4I4I4B" -- prompt tokens; size, tie, price at all other workers; number of named workers
local PRICE_STEP = 64
local TICKET_SIZE = ">I4I4" -- the first two numbers of TICKET_PRICES
local TICKET_TOKENS = ">I4" -- the first number of TICKET_PRICES
local TICKET_FLOW_AT = 18 -- the position of the ticket's flow
local TICKET_ARRIVAL_AT = TICKET_FLOW_AT + FLOW_BYTES -- the position of its time of arrival (us), as digits
local TICKET_PLACE_AT = TICKET_ARRIVAL_AT + PLACE_BYTES -- the position of its place in its flow
local TICKET_OWN_AT = TICKET_PLACE_AT + PLACE_BYTES -- the position of the prices at named workers
local TICKET_OWN = ">I4I4" -- a named worker's slot and price (us)
local OWN_BYTES = 8 -- length of the record of each named worker
local BARRED_SLOT = ">I4" -- behind the prices of named workers: slot of each worker that cannot serve the request
local SLOT_BYTES = 4 -- length of each such slot
local MAKING = "\1" -- last byte of a ticket, only there while a worker is computing half of its prompt or more

local MAX_TURNS = 256 -- most tickets that are looked at to find whose turn it is
local NO_ROOM_S = 1e-9 -- seconds of room that count as none: rounding may leave them over
