"""The tokenizer and the chat template of an engine that does not announce its own, as files for the routers.

They are loaded as vLLM loads them: by transformers, from a folder or a hub name. Without transformers a folder's files
are taken as they are. A router's probe, which tests a text and a chat, shows whether the engine really uses them.
"""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
HUB = "https://huggingface.co"
HUB_SECONDS = 3.0  # longest wait for a connection to the hub
NONE = "none"  # given in place of a tokenizer's name if the routers' settings name the tokenizer


class TokenizerError(Exception):
    """The tokenizer cannot be loaded; the text says why and what to do. later: a later try may succeed."""

    def __init__(self, text: str, *, later: bool = False) -> None:
        super().__init__(text)
        self.later = later


def load(name: str, chat_template: str = "") -> tuple[dict[str, bytes], dict[str, Any]]:
    """Load (files by name, facts) from a folder or hub name.

    chat_template: a file that replaces the model's own template, as vLLM's ``--chat-template`` does. Raises
    TokenizerError.
    """
    if name == NONE:
        return {}, {}
    files, facts = _by_transformers(name)
    if chat_template:
        try:
            files[TEMPLATE] = Path(chat_template).read_bytes()
        except OSError as error:
            raise TokenizerError(f"cannot read the chat template: {error}") from error
    return files, facts


def _by_transformers(name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    try:
        from transformers import AutoTokenizer  # this import takes 2 s
    except ModuleNotFoundError:
        if (Path(name) / TOKENIZER).is_file():
            return _by_files(Path(name))
        raise TokenizerError(
            f"{name!r} is no folder with a {TOKENIZER}, and a hub name needs: pip install 'warmfleet-worker[hub]'"
        ) from None
    away = "" if Path(name).is_dir() else hub_away()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=bool(away))
        files = {TOKENIZER: tokenizer.backend_tokenizer.to_str().encode()}
    except (OSError, ValueError, AttributeError, KeyError) as error:
        if away:
            text = f"cannot load the tokenizer {name!r}: it is not in this machine's cache, and {away}"
            raise TokenizerError(text, later=True) from error
        raise TokenizerError(f"cannot load the tokenizer {name!r}: {str(error)[:300]}") from error
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        files[TEMPLATE] = template.encode()
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return files, {"special_tokens": special, "special_prefix_ids": list(tokenizer("").input_ids)}


def hub_away() -> str:
    """Return why no connection to the hub can be made; empty if one can be made.

    Empty, too, with a proxy or in offline mode: then only the hub's client knows if it can load. Without this check
    transformers would ask an unreachable hub for each file, in silence for a minute.
    """
    offline = any(os.environ.get(name) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if offline or {"http", "https", "all"} & urllib.request.getproxies().keys():
        return ""
    hub = os.environ.get("HF_ENDPOINT") or HUB
    try:
        parts = urlsplit(hub)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), HUB_SECONDS).close()
    except (OSError, ValueError) as error:
        return f"the hub at {hub} cannot be reached ({error})"
    return ""


def _by_files(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    files = {TOKENIZER: (folder / TOKENIZER).read_bytes()}
    config = json.loads((folder / "tokenizer_config.json").read_text()) if _has(folder, "tokenizer_config.json") else {}
    if _has(folder, TEMPLATE):
        files[TEMPLATE] = (folder / TEMPLATE).read_bytes()
    elif isinstance(config.get("chat_template"), str):
        files[TEMPLATE] = config["chat_template"].encode()
    special = {key: _text(value) for key, value in config.items() if key.endswith("_token") and _text(value)}
    return files, {"special_tokens": special}


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _text(value: Any) -> str:
    """Read a special token of a config, which is a text, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
