"""Objects that are written as JSON, in the form of Hydra's configurations."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any


def made(value: Any, text: Callable[[str], Any] = str) -> Any:
    """What a value of JSON stands for; lists are tuples, and a text is what `text` makes of it.

    {"_target_": name, **options} is a call, with positional arguments in "_args_". {"_get_": name} is an object by its
    name.
    """
    if isinstance(value, list):
        return tuple(made(part, text) for part in value)
    if isinstance(value, str):
        return text(value)
    if not isinstance(value, dict):
        return value
    if "_get_" in value:
        return resolve_name(value["_get_"])
    options = {name: made(part, text) for name, part in value.items() if name not in ("_target_", "_args_")}
    if "_target_" not in value:
        return options
    return resolve_name(value["_target_"])(*made(value.get("_args_", []), text), **options)
