"""The blocks that the workers of ``apply_sync`` hold, the same in every process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

TENANTS = 20
HEAD, TAIL = 62, 563  # blocks: a chain of 10,000 tokens is the head of a tenant and the tail of a worker
MISSES = 0.1


@dataclass
class Data:
    """Half of a worker's table is constant, and prompts use it. The other half is a window that slides over a ring."""

    workers: int
    entries: int  # per worker
    heads: list[bytes] = field(default_factory=list)
    fixed: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random("heads")
        self.heads = [rng.randbytes(8 * HEAD) for _ in range(TENANTS)]
        self.fixed = [random.Random(f"fixed {worker}").randbytes(4 * self.entries) for worker in range(self.workers)]

    def held_heads(self, worker: int) -> bytes:
        """Return the heads that a worker holds: every second worker holds every second tenant's."""
        return b"".join(head for tenant, head in enumerate(self.heads) if (tenant + worker) % 2)

    def ring(self, worker: int) -> bytes:
        """Return the ring, which is twice as long as the window."""
        return random.Random(f"ring {worker}").randbytes(8 * self.entries)

    def chain(self, rng: random.Random) -> bytes:
        """Return the chain of a prompt. A worker holds nine of ten chains; others hold their heads, too."""
        if rng.random() < MISSES:
            return rng.randbytes(8 * (HEAD + TAIL))
        worker = rng.randrange(self.workers)
        tenant = rng.choice([number for number in range(TENANTS) if (number + worker) % 2])
        start = TAIL * rng.randrange(max(1, self.entries // 2 // TAIL))
        return self.heads[tenant] + self.fixed[worker][8 * start : 8 * (start + TAIL)]
