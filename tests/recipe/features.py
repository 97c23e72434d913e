"""docs/support.py as a module: the features, and which pairs of them work."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

_FILE = Path(__file__).parents[2] / "docs" / "support.py"


def support() -> ModuleType:
    """Return the module, which lies in no package."""
    spec = util.spec_from_file_location("support", _FILE)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for their module
    spec.loader.exec_module(module)
    return module
