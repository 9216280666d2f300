"""New members of a family, generated, judged and written by the `generation` section."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from d2plm.assembly.generation import LENGTHS, named_templates, require_writable
from d2plm.core.errors import ConfigError, did_you_mean, require, within
from d2plm.core.files import require_other_output
from d2plm.core.noise import Key
from d2plm.core.number_text import counted
from d2plm.core.progress import Progress
from d2plm.core.terminal import done, result
from d2plm.core.vocabulary import CANONICAL, PROTEIN, Tokens, decode
from d2plm.data.family import Family, read_family
from d2plm.data.fasta import write_fasta
from d2plm.data.fasta_export import require_form
from d2plm.evaluation.membership import Judge
from d2plm.evaluation.new_members import (
    header,
    headline,
    members_table,
    unlike_natural,
    write_members,
)
from d2plm.evaluation.plots import plot_new_members
from d2plm.evaluation.result import GENERATED
from d2plm.export.designs import write_sampling
from d2plm.families.designs import Design, FamilyDesigns, Wishes
from d2plm.generation.lengths import lengths_of, prompted
from d2plm.generation.sampler_settings import Sampling, in_a_line
from d2plm.settings.evaluation import GenerationSettings

MOST_REDRAWN = 20  # rounds in which rejected designs are drawn again


def generate_members(
    settings: GenerationSettings,
    output: Path,
    given: Family | None = None,
    held_out: Family | None = None,
) -> list[str]:
    """Write new members of the family `settings.relatives`, and how they compare with natural ones.

    Args:
        given: the family, instead of `settings.relatives`.
        held_out: natural members for comparison; None: given ones, each left out in turn.

    Raises:
        ConfigError: if a setting is invalid, would be ignored, or cannot be satisfied.
        DataError: if the family or the templates are invalid, or the output cannot be written.
    """
    require_other_output("output", output, [settings.relatives, settings.templates])
    require_form(output, PROTEIN, ())
    if given is None:
        given = read_family(Path(str(settings.relatives)), 1)
    require(settings.number > 0, "generation.number", settings.number, "an integer ≥ 1")
    with within("generation"):
        designs = _templates(settings, given)
    require_writable(output)
    names = [name for name, _ in designs]
    templates = [template for _, template in designs]
    with Progress("reading the family") as progress:
        named = {text.rpartition(":")[0] for text in (*settings.keep, settings.near or "")}
        law = FamilyDesigns(given, lambda text: progress.update(0, note=text), named)
    with within("generation"):
        sampling, wishes = law.sampling(Sampling.of(settings)), wishes_of(law, settings)
        draw = partial(
            law.design,
            wishes=wishes,
            min_length=settings.min_length,
            max_length=settings.max_length,
        )
        with Progress("generating") as progress:
            made = draw(templates, sampling, progress=progress.update)
    with Progress("judging", MOST_REDRAWN if settings.filter else 1) as progress:
        judge, redrawn = Judge(given, held_out, seed=settings.seed), 0
        described = _described(judge, made, names, law)
        for number in range(1, MOST_REDRAWN + 1 if settings.filter else 1):
            failed = [i for i, one in enumerate(unlike_natural(described)) if one]
            if not failed:
                break
            progress.update(number, note=f"{counted(len(failed), 'design')} drawn again")
            redrawn += len(failed)
            again = replace(sampling, seed=Key(sampling.seed, number).as_int())
            new = draw([templates[i] for i in failed], again)
            for i, one in zip(failed, new, strict=True):
                made[i] = one
            described = _described(judge, made, names, law)
    asked = {"identity": wishes.identity, "keep": settings.keep, "avoid": settings.avoid}
    asked |= {"near": settings.near, "filter": settings.filter}
    of_family = {"relatives": len(given.members), **{k: v for k, v in asked.items() if v}}
    note = {**sampling.applied(), **of_family}
    headers = [
        f"{row['name']} length={row['length']} parent={row['parent']} kept={row['kept']} {more} "
        f"{in_a_line({'seed': settings.seed})}"
        for row, more in zip(
            described["sets"][GENERATED]["proteins"], header(described), strict=True
        )
    ]
    sequences = [decode(one.tokens) for one in made]
    described["asked"] = ["identity"] * (wishes.identity is not None or wishes.near is not None)
    described["asked"] += ["among"] * (wishes.near is not None)
    write_fasta(output, zip(headers, sequences, strict=True))
    write_sampling(output, {"paradigm": "the family's alignment", **note})
    result(f"{headline(described)}\n{members_table(described).text()}")
    if settings.filter:
        left = sum(unlike_natural(described))
        rest = f"; {counted(left, 'design')} still fail" if left else ""
        result(f"filter: {counted(redrawn, 'design')} drawn again{rest}")
    file = write_members(described, output)
    plot_new_members(described, file.with_suffix(".png"))
    done(
        f"wrote {counted(len(made), 'protein')} to {output}, and {file.with_suffix('.csv')}, "
        f"{file} and {file.with_suffix('.png')}"
    )
    return sequences


def _described(
    judge: Judge, made: Sequence[Design], names: Sequence[str], law: FamilyDesigns
) -> dict[str, Any]:
    parents = [int(law.places[one.member]) for one in made]
    described = judge.describe([one.tokens for one in made], names, parents)
    for row, one in zip(described["sets"][GENERATED]["proteins"], made, strict=True):
        row |= {"parent": law.names[one.member], "kept": one.kept}
    return described


def _templates(settings: GenerationSettings, family: Family) -> list[tuple[str, Tokens | None]]:
    """Name and template of each design; None if its length is that of a member's path."""
    number = settings.number
    if settings.near is not None:
        for key in (*LENGTHS, "prompt", "templates"):
            unset = 1 if key == "min_length" else None
            value, wanted = getattr(settings, key), f"{unset or 'null'} with generation.near"
            require(value == unset, key, value, wanted)
    if settings.templates is not None:
        return [
            (f"{name}_{design + 1}", template)
            for name, template in named_templates(settings, PROTEIN)
            for design in range(number)
        ]
    if settings.length is None and settings.prompt is None:
        return [(f"d2plm_{index + 1}", None) for index in range(number)]
    limit = max(map(len, family.members)) * 2
    keys = {key: getattr(settings, key) for key in LENGTHS}
    made = prompted(
        lengths_of(family, limit),
        number,
        limit,
        PROTEIN,
        settings.prompt,
        seed=settings.seed,
        **keys,
    )
    return [(f"d2plm_{index + 1}", template) for index, template in enumerate(made)]


def wishes_of(law: FamilyDesigns, settings: GenerationSettings) -> Wishes:
    """Express the `generation` section in columns and members of the family.

    Raises:
        ConfigError: if a setting names no member or residue, or contradicts another one.
    """
    keep = dict[int, int]()
    for text in settings.keep:
        member, rest = _named(law, text, "keep", "NAME:H57,D102")
        for column, letter in _columns(law, member, rest, text):
            if keep.setdefault(column, letter) != letter:
                raise ConfigError("keeps two residues in one column", {"keep": text})
    unknown = {*settings.avoid.upper()} - {*CANONICAL}
    require(not unknown, "avoid", settings.avoid, f"letters of {CANONICAL}")
    near = None
    if settings.near is not None:
        member, rest = _named(law, settings.near, "near", "NAME:10")
        require(rest.isdecimal(), "near", settings.near, "a member and a number, NAME:10")
        near = member, int(rest)
    avoid = frozenset(CANONICAL.index(letter) for letter in settings.avoid.upper())
    return Wishes(keep, avoid, near, settings.identity)


def _named(law: FamilyDesigns, text: str, key: str, form: str) -> tuple[int, str]:
    """Split a text at its last colon into the index of the named member and the rest."""
    name, colon, rest = text.rpartition(":")
    require(bool(colon and rest), key, text, f"of the form {form}")
    places = [i for i, one in enumerate(law.names) if one == name]
    if len(places) != 1:
        said = f"{len(places)} members of the family are called {name!r}"
        if not places:
            said = f"no member of the family is called {name!r}{did_you_mean(name, law.names)}"
        raise ConfigError(said, {key: text})
    return places[0], rest


def _columns(law: FamilyDesigns, member: int, text: str, whole: str) -> list[tuple[int, int]]:
    """Columns and letters of the residues that a text lists: H57,D102-D104,195."""
    found = list[tuple[int, int]]()
    letters = law.letters[member]
    for word in re.split(r"[,;+\s]+", text.strip()):
        match = re.fullmatch(r"([A-Za-z]?)(\d{1,6})(?:-([A-Za-z]?)(\d{1,6}))?", word)
        if match is None:
            raise ConfigError(f"{word!r} is not a residue such as H57 or 57-60", {"keep": whole})
        first, last = int(match[2]), int(match[4] or match[2])
        if not 1 <= first <= last <= len(letters):
            raise ConfigError(f"{word}: the member has {len(letters)} residues", {"keep": whole})
        for position, letter in ((first, match[1]), (last, match[3] or "")):
            own = (CANONICAL + "X")[letters[position - 1]]
            if letter and letter.upper() != own:
                raise ConfigError(f"{word}: the member has {own} at {position}", {"keep": whole})
        positions = range(first - 1, last)
        for position, column in zip(positions, law.columns_of(member, positions), strict=True):
            if column is None or letters[position] == len(CANONICAL):
                raise ConfigError(
                    f"residue {position + 1} is in no column of the family", {"keep": whole}
                )
            found.append((column, int(letters[position])))
    return found
