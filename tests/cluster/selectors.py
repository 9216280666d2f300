"""`labelSelector` and `fieldSelector`, as far as clients here use them."""

import re
from collections.abc import Callable
from typing import Any

from tests.cluster.store import Object, Refusal

_SET = re.compile(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)")
_EQUALITY = re.compile(r"([^=!\s]+)\s*(!=|==?)\s*(.*)")
FIELDS = {  # what the API server can select by; any resource by its name and namespace
    "pods": ("status.phase", "spec.nodeName", "spec.restartPolicy", "status.podIP"),
    "events": ("involvedObject.", "reason", "type", "source", "reportingComponent"),
}


def by_labels(selector: str) -> Callable[[Object], bool]:
    """A predicate of objects from `a=b,c!=d,e,!f,g in (h,i)`."""
    terms = [term for term in re.split(r",(?![^(]*\))", selector) if term.strip()]

    def chosen(content: Object) -> bool:
        labels = content["metadata"].get("labels", {})
        return all(_holds(term.strip(), labels) for term in terms)

    return chosen


def by_fields(plural: str, selector: str) -> Callable[[Object], bool]:
    """A predicate of objects from `metadata.name=x,…`; rejects unknown fields."""
    terms = [_EQUALITY.fullmatch(term.strip()) for term in selector.split(",") if term.strip()]
    parts = [term.groups() for term in terms if term is not None]
    for path, _, _ in parts:
        known = ("metadata.name", "metadata.namespace", *FIELDS.get(plural, ()))
        if not path.startswith(known):
            message = f'Unable to find "{plural}" that match: field label not supported: {path}'
            raise Refusal(400, "BadRequest", message)

    def chosen(content: Object) -> bool:
        return all(
            (_field(content, path) == value) == (operator != "!=")
            for path, operator, value in parts
        )

    return chosen


def _holds(term: str, labels: dict[str, str]) -> bool:
    if match := _SET.fullmatch(term):
        key, operator, values = match.groups()
        inside = labels.get(key) in {value.strip() for value in values.split(",")}
        return inside == (operator == "in")
    if match := _EQUALITY.fullmatch(term):
        key, operator, value = match.groups()
        return (labels.get(key) == value) == (operator != "!=")
    return (term.lstrip("!") in labels) == (not term.startswith("!"))


def _field(content: Any, path: str) -> str:
    for part in path.split("."):
        content = content.get(part, "") if isinstance(content, dict) else ""
    return str(content)
