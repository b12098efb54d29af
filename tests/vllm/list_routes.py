"""Every route that vLLM's server can have. It runs in vLLM's own environment.

Most routes depend on the model and on options, so the routers are collected from their modules, too. No model is
loaded.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

TASKS = ("generate", "render", "transcription", "realtime")
OPTIONS = ("enable_fault_tolerance", "enable_scale_out", "enable_tokenizer_info_endpoint")


def routes() -> list[Any]:
    """The routes of an application with every option on, and those of every router of vLLM's modules."""
    import vllm.entrypoints
    from fastapi import APIRouter
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name in OPTIONS:
        setattr(args, name, True)
    found = list(build_app(args, TASKS).routes)
    for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
        if module.name.endswith("api_router"):
            values = vars(importlib.import_module(module.name)).values()
            found += [route for router in values if isinstance(router, APIRouter) for route in router.routes]
    return found


def methods_by_path() -> dict[str, list[str]]:
    paths: dict[str, set[str]] = {}
    for route in routes():
        paths.setdefault(route.path, set()).update(getattr(route, "methods", None) or ())
    return {path: sorted(methods) for path, methods in sorted(paths.items())}
