"""Text output about new members of a family: sentence, table, FASTA headers, file.

The content is that of `membership.describe_members`; nothing here needs HMMER.
"""

import json
from pathlib import Path
from typing import Any

from d2plm.core.files import files_digest, read_json, write_text
from d2plm.core.table import Table
from d2plm.evaluation.quality import GENERATED, NATURAL
from d2plm.evaluation.terms import REFERENCE

FEW = 3  # members; an HMM of fewer is little more than one protein's
FORMAT_VERSION = 2


def headline(described: dict[str, Any]) -> str:
    """The result as a sentence."""
    sets = described["sets"]
    generated, natural = sets[GENERATED], sets[NATURAL]
    total, members = len(generated["proteins"]), generated["members"]
    samples = sets[REFERENCE]
    beside = f"composition samples: {samples['members']} of {len(samples['proteins'])}"
    if natural["proteins"]:
        held_out = f"{natural['members']} of {len(natural['proteins'])}"
        beside = f"natural members not given: {held_out}; {beside}"
    are = "is a member" if members == 1 else "are members"
    text = f"of {total} generated proteins {members} {are} by the family's profile HMM ({beside})"
    if members:
        text += f", at {_range_text(generated)} identity to the nearest known member"
    if not natural["proteins"]:
        text += f"; none of the {described['given']} known members is held out to compare with"
    if described["given"] < FEW:
        text += f"; an HMM of {described['given']} knows little of what the family varies"
    return text


def members_table(described: dict[str, Any]) -> Table:
    """The sets beside each other."""
    rows = [
        [
            name,
            f"{own['members']} of {len(own['proteins'])}",
            _range_text(own),
            *map(_percent, (own["mean_coverage"], own["mean_conserved"], own["mean_identity"])),
        ]
        for name, own in described["sets"].items()
        if own["proteins"]
    ]
    notes = [
        "nearest: identity to the nearest given member, of the members; columns of the HMM filled;",
        "conserved columns with the family's residue; identity of two of them: on average",
    ]
    heads = ["", "members", "nearest", "columns", "conserved", "two of them"]
    return Table(heads, rows, notes=notes)


def header(described: dict[str, Any]) -> list[str]:
    """Of each generated protein what the header of its FASTA record says of it."""
    return [
        f"nearest={one['nearest']} identity={one['identity']:.3f} hmm_bits={one['bits']:.1f} "
        f"member={'yes' if one['member'] else 'no'}"
        for one in described["sets"][GENERATED]["proteins"]
    ]


def write_members(described: dict[str, Any], fasta: Path) -> Path:
    """Write the result of `describe_members` next to the FASTA file of the generated proteins.

    Raises:
        DataError: if a file cannot be read or written.
    """
    file = _file(fasta)
    content = {"format_version": FORMAT_VERSION, **described, "fasta": files_digest(fasta)}
    write_text(file, json.dumps(content, indent=2))
    return file


def read_members(fasta: Path) -> dict[str, Any] | None:
    """The stored result for the proteins in a FASTA file; None if there is none for these proteins.

    Raises:
        DataError: if a file is damaged.
    """
    kept = read_json(_file(fasta))
    if kept is None or kept.get("format_version") != FORMAT_VERSION:
        return None
    return kept if kept["fasta"] == files_digest(fasta) else None


def _range_text(described: dict[str, Any]) -> str:
    """The identities of the members of a set to their nearest given member, if there are any."""
    found = [100 * one["identity"] for one in described["proteins"] if one["member"]]
    return f"{min(found):.0f}–{max(found):.0f} %" if found else "–"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _file(fasta: Path) -> Path:
    return fasta.with_suffix(".members.json")
