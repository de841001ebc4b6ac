"""What runs inside Redis, each script in one step that nothing comes between.

An entry and the set of its chunk's contexts carry one hash tag, so that they share a slot of a cluster; the index of
all entries (last use and size) has a slot of its own. Redis deletes expired entries by itself, and the index does so by
the server's clock, so that nobody else's clock matters.
"""

from __future__ import annotations

PUT = """
-- keys: entry, contexts of the chunk; args: ttl in ms (0: static), context, meta, shards...
local old = redis.call('GET', KEYS[1])
if old then
  for i = 0, tonumber(string.match(old, '^(%d+):')) - 1 do redis.call('UNLINK', KEYS[1] .. ':' .. i) end
end
local ttl = tonumber(ARGV[1])
local lasting = redis.call('TTL', KEYS[2])
redis.call('SADD', KEYS[2], ARGV[2])
for i = 4, #ARGV do
  if ttl > 0 then redis.call('SET', KEYS[1] .. ':' .. (i - 4), ARGV[i], 'PX', ttl)
  else redis.call('SET', KEYS[1] .. ':' .. (i - 4), ARGV[i]) end
end
if ttl > 0 then redis.call('SET', KEYS[1], ARGV[3], 'PX', ttl) else redis.call('SET', KEYS[1], ARGV[3]) end
if ttl == 0 then redis.call('PERSIST', KEYS[2])
elseif lasting ~= -1 then redis.call('PEXPIRE', KEYS[2], ttl) end
return 1
"""
"""Store an entry in place of an older one."""

GET = """
-- keys: entry, contexts of the chunk; args: ttl in ms (0: none)
local meta = redis.call('GET', KEYS[1])
if not meta then return false end
local count = tonumber(string.match(meta, '^(%d+):'))
local ttl = tonumber(ARGV[1])
local found = {meta}
for i = 0, count - 1 do
  local name = KEYS[1] .. ':' .. i
  local shard = redis.call('GET', name)
  if not shard then break end
  found[#found + 1] = shard
  if ttl > 0 and redis.call('TTL', name) ~= -1 then redis.call('PEXPIRE', name, ttl) end
end
if ttl > 0 then
  for i = 1, 2 do if redis.call('TTL', KEYS[i]) ~= -1 then redis.call('PEXPIRE', KEYS[i], ttl) end end
end
return found
"""
"""An entry: meta and shards; its time to live begins anew."""

REMOVE = """
-- keys: entry, contexts of the chunk; args: context
redis.call('SREM', KEYS[2], ARGV[1])
local meta = redis.call('GET', KEYS[1])
if not meta then return 0 end
for i = 0, tonumber(string.match(meta, '^(%d+):')) - 1 do redis.call('UNLINK', KEYS[1] .. ':' .. i) end
return redis.call('UNLINK', KEYS[1])
"""
"""Drop an entry; 0 when it was not there."""

_WHOLE = """
local function whole(name)
  local meta = redis.call('GET', name)
  if not meta then return false end
  for i = 0, tonumber(string.match(meta, '^(%d+):')) - 1 do
    if redis.call('EXISTS', name .. ':' .. i) == 0 then return false end
  end
  return meta
end
"""

META = _WHOLE + "return whole(KEYS[1])  -- keys: entry"
"""Meta of an entry; nil when it is not there, or no longer with all its shards: a full server evicts them singly."""

VARIANTS = (
    _WHOLE
    + """
-- keys: contexts of the chunk; args: what entry names begin with
local found = {}
for _, context in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local meta = whole(ARGV[1] .. context)
  if meta then
    found[#found + 1] = context
    found[#found + 1] = meta
  elseif redis.call('EXISTS', ARGV[1] .. context) == 0 then redis.call('SREM', KEYS[1], context) end
end
return found
"""
)
"""Contexts and metas of a chunk's entries."""

_EXPIRE = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local used = clock[1] * 1000000 + clock[2]  -- a millisecond has room for several uses
local function forget(member)
  redis.call('ZREM', KEYS[1], member)
  redis.call('ZREM', KEYS[2], member)
  local size = redis.call('HGET', KEYS[3], member)
  if size then
    redis.call('HDEL', KEYS[3], member)
    redis.call('HINCRBY', KEYS[3], '', -tonumber(size))
  end
end
-- keys: uses, until when, sizes
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do forget(member) end
"""

RESERVE = (
    _EXPIRE
    + """
-- args: member, size, ttl in ms (0: static), capacity (-1: none), members that must stay...
local size, ttl, capacity = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local stay, pinned = {}, 0
for i = 5, #ARGV do
  stay[ARGV[i]] = true
  if ARGV[i] ~= ARGV[1] then pinned = pinned + tonumber(redis.call('HGET', KEYS[3], ARGV[i]) or 0) end
end
forget(ARGV[1])
if capacity >= 0 and size > capacity - pinned then return false end
local victims, offset = {}, 0
while capacity >= 0 and tonumber(redis.call('HGET', KEYS[3], '') or 0) + size > capacity do
  local oldest = redis.call('ZRANGE', KEYS[1], offset, offset)[1]
  if not oldest then break end
  if stay[oldest] then offset = offset + 1
  else
    victims[#victims + 1] = oldest
    forget(oldest)
  end
end
redis.call('ZADD', KEYS[1], used, ARGV[1])
if ttl > 0 then redis.call('ZADD', KEYS[2], now + ttl, ARGV[1]) end
redis.call('HSET', KEYS[3], ARGV[1], size)
redis.call('HINCRBY', KEYS[3], '', size)
return victims
"""
)
"""Make room in the index and take an entry in; returns what must be removed, nothing (nil) when it never fits."""

TOUCH = """
-- keys: uses, until when; args: member, ttl in ms (0: none)
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZADD', KEYS[1], 'XX', clock[1] * 1000000 + clock[2], ARGV[1])
local ttl = tonumber(ARGV[2])
if ttl > 0 then redis.call('ZADD', KEYS[2], 'XX', now + ttl, ARGV[1]) end
return 1
"""
"""Note a use in the index; 0 when the entry is not in it."""

FORGET = (
    _EXPIRE
    + """
-- args: member
if ARGV[1] then forget(ARGV[1]) end
return {redis.call('ZCARD', KEYS[1]), tonumber(redis.call('HGET', KEYS[3], '') or 0)}
"""
)
"""Take an entry out of the index, if one is named; returns entries and bytes left."""

VICTIMS = (
    _EXPIRE
    + """
-- args: bytes that may be left, most victims, members that must stay...
local excess = tonumber(redis.call('HGET', KEYS[3], '') or 0) - tonumber(ARGV[1])
local stay, victims, offset = {}, {}, 0
for i = 3, #ARGV do stay[ARGV[i]] = true end
while excess > 0 and #victims < tonumber(ARGV[2]) do
  local oldest = redis.call('ZRANGE', KEYS[1], offset, offset)[1]
  if not oldest then break end
  if not stay[oldest] then
    victims[#victims + 1] = oldest
    excess = excess - tonumber(redis.call('HGET', KEYS[3], oldest) or 0)
  end
  offset = offset + 1
end
return victims
"""
)
"""Which entries to remove, the longest unused first, so that so many bytes are left."""

LINK = """
-- keys: chunks of a document; args: chunks...
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for _, chunk in ipairs(ARGV) do redis.call('ZADD', KEYS[1], now, chunk) end
return 1
"""
"""Note chunks of a document."""

OLD_LINKS = """
-- keys: chunks of a document; args: ms
local clock = redis.call('TIME')
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', clock[1] * 1000 + math.floor(clock[2] / 1000) - ARGV[1])
"""
"""Chunks that nobody noted for so long."""

UNLINK = """
-- keys: chunks of a document; args: ms, chunks...
local clock = redis.call('TIME')
local latest = clock[1] * 1000 + math.floor(clock[2] / 1000) - ARGV[1]
for i = 2, #ARGV do
  local noted = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if noted and tonumber(noted) <= latest then redis.call('ZREM', KEYS[1], ARGV[i]) end
end
return redis.call('ZCARD', KEYS[1])
"""
"""Forget chunks of a document unless they were noted again; returns how many are left."""

SIZES = """
-- keys: until when, sizes; args: members...
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
local found = {}
for i, member in ipairs(ARGV) do
  local size, expires = redis.call('HGET', KEYS[2], member), redis.call('ZSCORE', KEYS[1], member)
  local is_there = size and not (expires and tonumber(expires) <= now)
  found[i] = is_there and {tonumber(size), expires and 1 or 0}
end
return found
"""
"""Size of each entry and whether it has a time to live; nil for those that are gone. Changes nothing."""
