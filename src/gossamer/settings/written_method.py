"""A method as an option of the command line writes it."""

from __future__ import annotations

import yaml

from gossamer.settings.yaml_io import Loader
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig, Written


def written_method(text: str, *, key: str) -> Written:
    """Return the method that a text names, "name" or "{name: {field: value}}", as a file would hold it.

    Raises BadInput.
    """
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        said = str(error).splitlines()[0]
        do = "write a name, or {name: {field: value}} in quotes"
        raise bad_input(wanted="a method", got=f"{text!r} ({said})", do=do, key=key) from None
    return MethodConfig.parse(value, key=key).written()
