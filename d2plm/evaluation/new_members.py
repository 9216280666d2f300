"""Text output about new members of a family: a sentence, tables, FASTA headers, a file.

The figures come from `membership.Judge`; nothing here needs HMMER.
"""

import csv
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from d2plm.core.files import files_digest, read_json, write_text, written_beside
from d2plm.core.table import Table
from d2plm.evaluation.result import GENERATED

NATURAL = "natural members"
FEW = 3  # an HMM of fewer members is little more than that of one protein
FORMAT_VERSION = 4
OF_A_DESIGN = (
    *("name", "parent", "kept", "length", "bits", "member", "ends", "coverage", "conserved"),
    *("low_complexity", "nearest", "identity"),
)

# Tolerated differences of designs from natural members.
LEAST_BITS, LEAST_CONSERVED = 0.95, 0.8  # relative to natural members
COVERAGE, SIMPLE, AMONG = 0.05, 0.008, 0.1  # absolute differences
CLOSE, NEARLY = 0.7, 0.01  # identity to the nearest member that is never too close; its tolerance


def headline(described: dict[str, Any]) -> str:
    """The result as a sentence, starting with the properties that are far from natural members."""
    total = len(described["sets"][GENERATED]["proteins"])
    own, natural = _figures(described)
    if described["given"] == 1 and not described["held_out"]:
        given = f"{_percent(own['identity'])} identical to it: there is nothing to compare with"
        return f"{total} designs from one given member, {given}"
    far = worse_than_natural(own, natural, described.get("asked", ()))
    beside = (
        f"{own['bits']:.0f} bits by the family's profile HMM, natural members {natural['bits']:.0f}"
    )
    if far:
        text = f"the {total} designs are NOT like natural members: {'; '.join(far)} ({beside})"
    else:
        text = (
            f"the {total} designs are like natural members by what the given members tell: {beside}"
        )
    text += f"; {_percent(own['identity'])} identity to the nearest given member"
    if described["given"] < FEW:
        text += f"; an HMM of {described['given']} knows little of what the family varies"
    return text


def worse_than_natural(
    own: dict[str, Any], natural: dict[str, Any], asked: Collection[str] = ()
) -> list[str]:
    """Phrases for the ways in which designs are unlike natural members, except those `asked`."""
    far = []
    if own["bits"] < LEAST_BITS * natural["bits"]:
        far.append(f"{own['bits']:.0f} bits against {natural['bits']:.0f}")
    kept, expected = own["keeps_all"], natural["keeps_all"]
    if kept is not None and expected is not None and kept < LEAST_CONSERVED * expected:
        far.append(f"{_percent(kept)} keep all conserved residues against {_percent(expected)}")
    # Members of a family may fill very different columns, so a few designs also differ by chance.
    of_chance = 2 * math.hypot(own["coverage_error"], natural["coverage_error"])
    if abs(own["coverage"] - natural["coverage"]) > max(COVERAGE, of_chance):
        covered = f"{_percent(own['coverage'])} of the columns filled"
        far.append(f"{covered} against {_percent(natural['coverage'])}")
    if own["low_complexity"] > natural["low_complexity"] + SIMPLE:
        far.append(
            f"{100 * own['low_complexity']:.1f} % of low complexity against "
            f"{100 * natural['low_complexity']:.1f} %"
        )
    if "identity" not in asked and own["identity"] > max(CLOSE, natural["identity"]) + NEARLY:
        nearest = f"{_percent(own['identity'])} identical to the nearest given member"
        far.append(f"{nearest} against {_percent(natural['identity'])}")
    among = own["among"], natural["among"]
    if "among" not in asked and None not in among and among[0] > among[1] + AMONG:
        far.append(f"{_percent(among[0])} identical to each other against {_percent(among[1])}")
    return far


def unlike_natural(described: dict[str, Any]) -> list[bool]:
    """Which designs fail: no member, or worse than nine in ten natural members in any property."""
    proteins = described["sets"][NATURAL]["proteins"]

    def tenth(name: str, highest: bool = False) -> float:
        values = sorted((one[name] for one in proteins if one[name] is not None), reverse=highest)
        return float(values[len(values) // 10]) if values else 0.0

    bits, kept, simple = tenth("bits"), tenth("conserved"), tenth("low_complexity", True)
    ends = tenth("ends")
    return [
        not one["member"]
        or one["bits"] < bits
        or one["ends"] < ends
        or (one["conserved"] is not None and one["conserved"] < kept)
        or one["low_complexity"] > simple
        for one in described["sets"][GENERATED]["proteins"]
    ]


def members_table(described: dict[str, Any]) -> Table:
    rows = []
    for name, own in described["sets"].items():
        if own["proteins"]:
            found = own["figures"]
            first = [name, str(len(own["proteins"])), f"{found['bits']:.0f}"]
            shares = (found[one] for one in ("ends", "keeps_all", "coverage"))
            simple = f"{100 * found['low_complexity']:.1f} %"
            last = (found[one] for one in ("identity", "among"))
            rows.append([*first, *map(_percent, shares), simple, *map(_percent, last)])
    left_out = "were not given" if described["held_out"] else "without themselves"
    notes = [
        f"bits: by the HMM of the given members, of natural members {left_out}, of designs without "
        "their parent;",
        f"conserved: have all {described['conserved']} residues that 95 % of the given share; "
        "simple: windows of low complexity;",
        "nearest: identity to the nearest given member, in the columns",
    ]
    heads = ["", "number", "bits", "both ends", "conserved", "columns", "simple", "nearest"]
    return Table([*heads, "two of them"], rows, notes=notes)


def header(described: dict[str, Any]) -> list[str]:
    return [
        f"nearest={one['nearest']} identity={one['identity']:.3f} bits={one['bits']:.1f} "
        f"member={'yes' if one['member'] else 'no'} ends={'yes' if one['ends'] else 'no'} "
        f"conserved={_number(one['conserved'])} low_complexity={one['low_complexity']:.3f}"
        for one in described["sets"][GENERATED]["proteins"]
    ]


def write_members(described: dict[str, Any], fasta: Path) -> Path:
    """Write the result of `Judge.describe` next to the FASTA file; raises DataError on failure."""
    file = _file(fasta)
    content = {"format_version": FORMAT_VERSION, **described, "fasta": files_digest(fasta)}
    write_text(file, json.dumps(content, indent=2))
    with (
        written_beside(file.with_suffix(".csv")) as partial,
        partial.open("w", encoding="utf-8", newline="") as table,
    ):
        writer = csv.DictWriter(table, OF_A_DESIGN, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(described["sets"][GENERATED]["proteins"])
    return file


def read_members(fasta: Path) -> dict[str, Any] | None:
    """The stored result for these proteins, or None; raises DataError if a file is damaged."""
    kept = read_json(_file(fasta))
    if kept is None or kept.get("format_version") != FORMAT_VERSION:
        return None
    return kept if kept["fasta"] == files_digest(fasta) else None


def _figures(described: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own, natural = (described["sets"][one]["figures"] for one in (GENERATED, NATURAL))
    return own, natural


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _number(share: float | None) -> str:
    return "none" if share is None else f"{share:.3f}"


def _file(fasta: Path) -> Path:
    return fasta.with_suffix(".members.json")
