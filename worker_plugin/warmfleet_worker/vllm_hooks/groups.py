"""Reads from an engine the needs of its KV cache groups of a prefix, and which of its blocks precede each other."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from warmfleet_worker.ends import WHOLE_PREFIX, Rule, Rules
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors

if TYPE_CHECKING:
    from warmfleet_worker.ends import GroupedTransitions

logger = logging.getLogger("vllm.warmfleet")

_NOT_KNOWN = (
    "is a group of KV caches whose rule is not known (or a draft model drops its last block): routers match prompts by "
    "the full-attention group alone, so this engine may compute more of a prompt than they expect"
)


def rules_of(scheduler: Any, main: int) -> Rules | None:
    """Return what each group needs of a prefix; None if routers know all by the main group alone, or if this engine's
    rules are not known: groups of another kind, or groups of which a draft model drops the last block.
    """
    coordinator = scheduler.kv_cache_manager.coordinator
    groups: dict[tuple[int, int, int], list[int]] = {}
    for number, manager in enumerate(coordinator.single_type_managers):
        spec = manager.kv_cache_spec
        if number == main or not getattr(spec, "prefix_cacheable", True):  # vLLM before 0.29 has no such groups
            continue
        needed = _needed(spec, int(manager.block_size))
        if needed is None or _drops_last_block(coordinator, number):
            logger.warning("warmfleet: %s %s", type(spec).__name__, _NOT_KNOWN)
            return None
        groups.setdefault((int(manager.block_size), *needed), []).append(number)
    others = tuple(Rule(tuple(same), tokens, *needed) for (tokens, *needed), same in groups.items())
    if not others or _drops_last_block(coordinator, main):
        return None
    partial = getattr(coordinator, "enable_partial_hash_hits", False)
    own = Rule((main,), int(coordinator.single_type_managers[main].block_size))
    return Rules(own, others, int(coordinator.hash_block_size if partial else coordinator.scheduler_block_size))


def keeps_all_ends(scheduler: Any, rules: Rules) -> bool:
    """Return whether a prompt that is being computed leaves an end at each of its blocks, until these are evicted.

    States, and windows if vLLM keeps them sparsely (which it does by default since 0.30), are kept at few places.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    coordinator = scheduler.kv_cache_manager.coordinator
    states = any(isinstance(manager.kv_cache_spec, MambaSpec) for manager in coordinator.single_type_managers)
    return not states and coordinator.retention_interval is None and rules.align_tokens == rules.main.block_tokens


def report_chains(pool: Any, transitions: GroupedTransitions, groups: frozenset[int]) -> None:
    """Make this ``BlockPool`` tell ``transitions`` which blocks precede those that it is about to store."""
    original, hash_tokens = pool.cache_full_blocks, int(pool.hash_block_size)
    told = set(groups)

    def cache_full_blocks(
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if kv_cache_group_id in told and num_cached_blocks < num_full_blocks:
            told.discard(kv_cache_group_id)  # unless the end of this block is reached
            with swallow_errors("could not read which blocks precede each other"):
                steps, first = block_size // hash_tokens, max(0, num_cached_blocks - 1)
                hashes = request.block_hashes[(first + 1) * steps - 1 : num_full_blocks * steps : steps]
                transitions.note_chain(kv_cache_group_id, first, hashes)
                told.add(kv_cache_group_id)
        first_arguments = (request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id)
        return original(*first_arguments, *args, **kwargs)

    pool.cache_full_blocks = cache_full_blocks


def is_full_attention(spec: Any) -> bool:
    """Return whether a group's layers keep whole prefixes, by its ``kv_cache_spec``."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    inner = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
    return isinstance(inner, FullAttentionSpec)


def _needed(spec: Any, block_tokens: int) -> tuple[int, int] | None:
    """Return ``blocks`` and ``chunk_tokens`` of the rule for such groups; None if the rule is not known."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

    inner = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
    if isinstance(inner, FullAttentionSpec):
        return WHOLE_PREFIX, 0
    if isinstance(inner, SlidingWindowSpec):
        return max(1, -(-(int(inner.sliding_window) - 1) // block_tokens)), 0
    if isinstance(inner, ChunkedLocalAttentionSpec):
        chunk = int(inner.attention_chunk_size)
        return (max(1, chunk // block_tokens), chunk) if chunk % block_tokens == 0 else None
    return (1, 0) if isinstance(inner, MambaSpec) else None


def _drops_last_block(coordinator: Any, group: int) -> bool:
    """Return whether a draft model makes this group compute the last block that it holds once more."""
    dropping = getattr(coordinator, "drop_eagle_group_ids", None)  # since 0.33, where ``eagle_group_ids`` may drop none
    return group in (coordinator.eagle_group_ids if dropping is None else dropping)
