"""YAML for configuration files: 1e-4 is a number (YAML 1.1 wants 1.0e-4), and a date stays text."""

from __future__ import annotations

import re
from typing import Any

import yaml

_DATE = "tag:yaml.org,2002:timestamp"
_EXPONENT = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")


class Loader(yaml.SafeLoader):
    """The YAML loader of configuration files."""


class _Dumper(yaml.SafeDumper):
    """The YAML dumper whose text `Loader` reads back: text that looks like a number is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")
