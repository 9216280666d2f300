"""`labelSelector` and `fieldSelector`, as far as clients here use them."""

import re
from collections.abc import Callable
from typing import Any

from tests.cluster.store import Object, Refusal

_SET = re.compile(r"(\S+)\s+in\s+\(([^)]*)\)")
FIELDS = ("metadata.name", "metadata.namespace", "status.phase", "involvedObject.", "type")


def by_labels(selector: str) -> Callable[[Object], bool]:
    """A predicate of objects from `a=b,g in (h,i)`."""
    wanted: dict[str, set[str]] = {}
    for term in re.split(r",(?![^(]*\))", selector) if selector else ():
        if match := _SET.fullmatch(term.strip()):
            key, values = match.groups()
        else:
            key, _, values = term.strip().partition("=")
        wanted[key] = {value.strip() for value in values.removeprefix("=").split(",")}

    def chosen(content: Object) -> bool:
        labels = content["metadata"].get("labels", {})
        return all(labels.get(key) in values for key, values in wanted.items())

    return chosen


def by_fields(selector: str) -> Callable[[Object], bool]:
    """A predicate of objects from `metadata.name=x,…`; rejects unknown fields."""
    wanted = dict(term.split("=") for term in selector.split(",") if term)
    if unknown := [path for path in wanted if not path.startswith(FIELDS)]:
        raise Refusal(400, "BadRequest", f"field label not supported: {unknown[0]}")
    return lambda content: all(_field(content, path) == value for path, value in wanted.items())


def _field(content: Any, path: str) -> str:
    for part in path.split("."):
        content = content.get(part, "") if isinstance(content, dict) else ""
    return str(content)
