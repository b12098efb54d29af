"""Turns the body of /inference/v1/generate, which names its prompt by token ids, into that of a completion. Pure.

A body whose prompt or use of the cache the router does not know raises NotReproducible with a short reason.
"""

from __future__ import annotations

from typing import Any

from warmfleet.prompt.messages import NotReproducible
from warmfleet.prompt.request import is_ids

#: Fields of the body that mean the same in a completion.
SAME = ("model", "stream", "cache_salt", "priority", "request_id", "prompt_cache_key")
MEDIA = ("features", "content_parts")  # fields that name images, audio and video
#: Fields of ``sampling_params`` with which the engine skips its cache.
UNCACHED = ("prompt_logprobs", "prompt_logprob_token_ids", "skip_reading_prefix_cache")


def as_completion(body: dict[str, Any]) -> dict[str, Any]:
    """Return the completion's body. Raises NotReproducible."""
    if any(body.get(name) is not None for name in MEDIA):
        raise NotReproducible("parts")
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise NotReproducible("content")
    if any(sampling.get(name) is not None and sampling[name] is not False for name in UNCACHED):
        raise NotReproducible("prompt_logprobs")
    if not is_ids(body.get("token_ids")):
        raise NotReproducible("content")
    same = {name: body[name] for name in SAME if body.get(name) is not None}
    limits = {name: sampling[name] for name in ("max_tokens", "n") if sampling.get(name) is not None}
    return same | limits | {"prompt": body["token_ids"]}
