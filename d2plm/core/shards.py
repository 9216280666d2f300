"""Work in shards: shard i of n computes every n-th record; the last one to finish joins all parts.

Records keep their global numbers, so draws, rows and their order are those of a single process.
Parts are in a folder next to the output. A repeated shard reuses its part.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from d2plm.core.errors import DataError, require
from d2plm.core.files import files_digest, read_json, write_text
from d2plm.core.locks import locked
from d2plm.core.terminal import done

T = TypeVar("T")

MAX_SHARDS = 500  # all parts are open at once when they are joined
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"  # Kubernetes sets it in the pods of an Indexed Job
_ABSENT = object()


@dataclass(frozen=True)
class Shard:
    """The records `index`, `index + count`, … of all."""

    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, text: str | None) -> "Shard":
        """Parse the setting `shard`; None is all records.

        If it lists several indices, such as `0,4-7/64`, a pod takes the one at position
        `INDEX_VARIABLE`. Raises `ConfigError` if there is no such shard.
        """
        if text is None:
            return cls()
        given, _, number = text.partition("/")
        count, last = int(number), max(map(int, re.findall(r"\d+", given)))
        indices = parse_indices(given) if last < count <= MAX_SHARDS else []
        require(bool(indices), "shard", text, f"I/N with I from 0 to N - 1, and N ≤ {MAX_SHARDS}")
        place = os.environ.get(INDEX_VARIABLE, "") if len(indices) > 1 else "0"
        fits = place.isdecimal() and int(place) < len(indices)
        wanted = f"one shard, such as {indices[0]}/{count}; only an Indexed Job's pods take several"
        require(fits, "shard", text, wanted)
        return cls(indices[int(place)], count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of_all(self, items: Iterable[T]) -> Iterator[T]:
        """The shard's own `items`."""
        return islice(items, self.index, None, self.count)

    def numbers(self, first: int, last: int) -> range:
        """Global numbers of the shard's own records `first` to `last` (exclusive)."""
        return range(self.index + first * self.count, self.index + last * self.count, self.count)


def interleaved(parts: Iterable[Iterable[T]]) -> Iterator[T]:
    """All records in order, given the records of each shard."""
    rounds = zip_longest(*parts, fillvalue=_ABSENT)
    return (one for one in chain.from_iterable(rounds) if one is not _ABSENT)  # type: ignore[misc]


def parse_indices(text: str) -> list[int]:
    """[1, 3, 4, 5] for `1,3-5`, as Kubernetes writes the indices of a Job."""
    bounds = [one.partition("-") for one in text.split(",") if one]
    return [n for low, _, high in bounds for n in range(int(low), int(high or low) + 1)]


def format_indices(numbers: Sequence[int]) -> str:
    """The inverse of `parse_indices`, for ascending numbers."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else f"{one[0]}" for one in ends)


def in_shards(
    output: Path,
    shard: Shard,
    made_of: Mapping[str, Any],
    compute: Callable[[Path], object],
    join: Callable[[list[Path]], object],
    is_complete: Callable[[], bool] | None = None,
) -> list[int]:
    """Compute a shard's part unless it exists, and join the parts if all exist.

    Returns the missing shards; none if the output is complete. Raises `DataError` if the folder of
    the parts belongs to another output.

    Args:
        made_of: what determines the output, as JSON; parts made of anything else are rejected.
        compute: writes the part to a path, which must not exist before it is complete.
        join: writes the output from the paths of all parts.
        is_complete: whether the output is complete; None: whether it exists.
    """
    folder = output.with_name(f"{output.name}.shards")
    manifest = folder / "manifest.json"
    parts = [folder / "parts" / str(index) for index in range(shard.count)]
    content = json.loads(json.dumps({**made_of, "shards": shard.count}, default=str))

    def digest() -> str | bool:
        return files_digest(output) if output.is_file() else True

    def is_joined() -> bool:
        there = (is_complete or output.exists)()
        return there and (read_json(manifest) or {}).get("joined") == digest()

    with locked(folder / "manifest.lock", f"another shard begins {output}"):
        known = read_json(manifest)
        if known is None:
            write_text(manifest, json.dumps(content, indent=2))
        elif differing := [key for key, own in content.items() if known.get(key) != own]:
            raise DataError(
                f"{folder}: contains shards of another model, input, setting or number of shards "
                f"({', '.join(differing)}); choose another output, or delete it"
            )
    own = parts[shard.index]
    with locked(own.with_name(f"{own.name}.lock"), f"another process computes shard {shard}"):
        if not is_joined() and not own.exists():
            compute(own)
    with locked(folder / "join.lock", f"another shard joins {output}"):
        if is_joined():
            shutil.rmtree(folder / "parts", ignore_errors=True)  # left by a kill after joining
            done(f"{output} is complete: all {shard.count} shards are joined")
            return []
        missing = [index for index, part in enumerate(parts) if not part.exists()]
        if missing:
            each = "" if len(missing) == 1 else ", …"
            done(
                f"shard {shard} of {output} is complete; missing: {format_indices(missing)}; run "
                f"the same command with shard={missing[0]}/{shard.count}{each}"
            )
            return missing
        join(parts)
        write_text(manifest, json.dumps({**content, "joined": digest()}, indent=2))
        shutil.rmtree(folder / "parts", ignore_errors=True)
    done(f"joined {shard.count} shards")
    return []
