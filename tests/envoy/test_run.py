"""The command that users try with a fleet on their machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_prints_the_configuration_without_any_package_installed() -> None:
    """-S: no environment's packages are found."""
    argv = [sys.executable, "-S", "-m", "tests.envoy.run", "--print", "--port", "81", "127.0.0.1:9002"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env={})
    assert done.returncode == 0, done.stderr
    [listener] = json.loads(done.stdout)["static_resources"]["listeners"]
    assert (listener["name"], listener["address"]["socket_address"]["port_value"]) == ("duplex", 81)
