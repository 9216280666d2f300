"""The schemas of the custom resources, closed: unknown keys are rejected.

A real API server silently drops unknown keys; these tests are to find misspelt ones.
"""

import gzip
import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.store import Object, Resource


def errors(resource: Resource, content: Object) -> list[str]:
    """What a custom resource's schema has against an object; none where $D2PLM_CRD_DIR is unset."""
    folder = os.environ.get("D2PLM_CRD_DIR")
    if not folder or not resource.group or resource.plural in ("workflows", "jobs"):  # no CRDs
        return []
    found = _validator(Path(folder), resource).iter_errors(content)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def closed(schema: Any) -> Any:
    """An OpenAPI schema of a custom resource as a JSON schema that allows no other keys."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and not is_open
    ):
        result.setdefault("additionalProperties", False)
    return result


@cache
def _validator(folder: Path, resource: Resource) -> Any:
    import jsonschema  # type: ignore[import-untyped]  # it has no stubs

    plural = resource.plural.removeprefix("cluster")  # the same specification
    file = folder / f"{resource.group}_{plural}.yaml.gz"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    definition = yaml.load(gzip.decompress(file.read_bytes()), loader)  # noqa: S506  # it is safe
    versions = {version["name"]: version for version in definition["spec"]["versions"]}
    schema = versions[resource.version]["schema"]["openAPIV3Schema"]
    return jsonschema.Draft202012Validator(closed(schema))
