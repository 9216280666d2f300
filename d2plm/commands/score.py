"""d2plm score: the likelihood of each sequence in a file, or the effects of mutations.

Proteins are read twice: first to check them before hours are spent on scoring, then to score them
in chunks, so that memory does not grow with the file. Names of proteins with relatives, and a table
of variants, are kept in memory.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from d2plm.core.batch import of_size
from d2plm.core.errors import D2PLMError, DataError, require, within
from d2plm.core.files import require_other_output, written_beside
from d2plm.core.number_text import counted
from d2plm.core.precision import resolve_precision
from d2plm.core.progress import Progress
from d2plm.core.shards import Shard, in_shards, interleaved
from d2plm.core.terminal import JSON, done, output_modes
from d2plm.data.family import Family, RelativesCheck, read_families
from d2plm.data.fasta import FastaRecord, read_fasta
from d2plm.data.ingest import digest_of_files
from d2plm.data.sources import is_stream, read_sequences
from d2plm.evaluation import scoring
from d2plm.evaluation.rank_correlation import rank_correlation
from d2plm.evaluation.variant_table import (
    ALONE_COLUMN,
    MODEL_COLUMN,
    SCORE_COLUMN,
    TERM_COLUMNS,
    Placed,
    read_variants,
)
from d2plm.export.exported_model import ExportedModel, weights_digest
from d2plm.families.variants import Variant
from d2plm.paradigms.masked import MaskedParadigm
from d2plm.settings.commands import ScoreSettings
from d2plm.tracking.locations import open_model

PSEUDO_LOG_LIKELIHOOD = "pseudo_log_likelihood"
CUT_PROTEIN = "remove it, or cut it into parts (mutation_offset sets the numbering of a part)"

_CHUNK_TOKENS = 1 << 18  # tokens of the proteins that are scored together

log = logging.getLogger(__name__)


def run(config: ScoreSettings) -> dict[str, Any]:
    """Score every protein or every variant, and write one CSV row for each."""
    output = None if config.output == "-" else config.output
    config = replace(config, output=output)
    whole = config.mutations is None and config.relatives is None
    fits, wanted = whole or config.window is None, "null with mutations or relatives"
    require(fits, "window", config.window, wanted)
    read = [config.input, config.mutations, config.relatives]
    require_other_output("output", output, read)
    fits, wanted = config.mutations is None and output is not None, "null with mutations, or stdout"
    require(config.shard is None or fits, "shard", config.shard, wanted)
    exported = open_model(config.model_dir, config.device, config.tracking_uri, key="model_dir")
    with within(
        "evaluation", {name: name for name in ("precision", "max_relatives", "mutation_offset")}
    ):
        return (score_proteins if config.mutations is None else score_variants)(config, exported)


def score_proteins(config: ScoreSettings, exported: ExportedModel) -> dict[str, Any]:
    """Write a row with the bound, and the pseudo-log-likelihood, of each record of the input.

    Returns:
        The `output` and the number of proteins; with `--json` and no output, also their rows. With
        a shard, the `output` and the `missing` shards.
    """
    shard = Shard.of(config.shard)
    paradigm, vocabulary = exported.paradigm, exported.vocabulary
    asked = config.pseudo_log_likelihood
    predicting = not vocabulary.is_text if asked is None else asked
    if predicting:
        remedy = f"set {PSEUDO_LOG_LIKELIHOOD}=false to compute only the bound"
        masked = scoring.require_masked(paradigm, PSEUDO_LOG_LIKELIHOOD, remedy)
    evaluation, path = config.evaluation, Path(str(config.input))
    every = partial(read_sequences, path, vocabulary, config.window, config.max_residues)
    once = list(every()) if is_stream(path) else None  # a pipe can be read only once

    def records() -> Iterator[FastaRecord]:
        return shard.of_all(once or every())

    if config.relatives is not None:
        exported.require_taking_relatives()
    families = _families(config, (record.name for record in once or every()))
    families = families and families[shard.index :: shard.count]
    tokens, check = 0, RelativesCheck(str(config.relatives), str(path))
    given = exported.all_short_enough(records(), can_cut=config.relatives is None)
    for number, record in enumerate(given):
        residues = int(vocabulary.is_predicted(record.tokens).sum()) if predicting else 0
        tokens += (len(record.tokens) + 2) * (evaluation.masks_per_sequence + residues)
        if families is not None:
            check.add(record.name, families[number], record.tokens)
    check.report()
    model, written, rows = exported.denoiser(config.precision), 0, list[Any]()

    def write(target: Path | None) -> None:
        nonlocal written, rows
        with Progress("scoring", tokens or None, unit="tokens") as progress:
            settings = _settings(config, exported, progress)
            for chunk in of_size(records(), lambda r: len(r.tokens) + 2, _CHUNK_TOKENS):
                first, written = written, written + len(chunk)
                names, sequences = [r.name for r in chunk], [r.tokens for r in chunk]
                own = None if families is None else families[first:written]
                draws = scoring.bound_draws(
                    model,
                    paradigm,
                    sequences,
                    masks_per_sequence=evaluation.masks_per_sequence,
                    seed=evaluation.seed,
                    ids=shard.numbers(first, written),
                    families=own,
                    names=names,
                    **settings,
                )
                table = pd.DataFrame(scoring.score_columns(draws, sequences, vocabulary))
                table.insert(0, "name", np.array(names, dtype=object))
                if predicting:
                    table[PSEUDO_LOG_LIKELIHOOD] = scoring.pseudo_log_likelihoods(
                        model, masked, sequences, families=own, names=names, **settings
                    )
                if config.output is None and JSON in output_modes():
                    rows += table.round(4).to_dict("records")
                else:
                    style = {"header": not first, "index": False, "float_format": "%.4f"}
                    table.to_csv(target or sys.stdout, mode="a", **style)

    if config.shard is not None:
        missing = _in_shards(config, exported, shard, write)
        return {"output": config.output, "shard": str(shard), "missing": missing}
    with _target(config) as target:
        write(target)
    if config.output is not None:
        done(f"wrote {config.output} ({written} {vocabulary.nouns.sequence}s)")
    return {
        "model_dir": config.model_dir,
        "output": config.output,
        "number": written,
        "proteins": rows,
    }


def _in_shards(
    config: ScoreSettings, exported: ExportedModel, shard: Shard, write: Callable[[Path], None]
) -> list[int]:
    """Write the rows of a shard, and join all; returns the missing shards."""
    others = ("model_dir", "device", "tracking_uri", "shard", "output", "input", "relatives")
    made_of = {key: value for key, value in asdict(config).items() if key not in others}
    made_of["model"] = weights_digest(exported.folder)
    made_of["precision"] = resolve_precision(config.precision, exported.model.device)
    for key in ("input", "relatives"):
        path = getattr(config, key)
        made_of[key] = path and digest_of_files(key, path)

    def compute(part: Path) -> None:
        with written_beside(part) as rows:
            rows.touch()  # a shard may have no records
            write(rows)

    def join(parts: list[Path]) -> None:
        with (
            ExitStack() as stack,
            written_beside(str(config.output)) as target,
            target.open("w", encoding="utf-8", newline="") as table,
        ):
            files = [stack.enter_context(part.open(encoding="utf-8", newline="")) for part in parts]
            table.write(*[next(file, "") for file in files][:1])  # the headers are the same
            table.writelines(interleaved(files))

    return in_shards(Path(str(config.output)), shard, made_of, compute, join)


def score_variants(config: ScoreSettings, exported: ExportedModel) -> dict[str, Any]:
    """Write the table of variants with their effects, and report the correlations.

    With relatives, their alignment determines the score (`FamilyEffects`); further columns are its
    terms, and the model's scores given the relatives, if it takes any, and without them.

    Returns:
        The `output`, the `scores` in the order of the rows (NaN where a row is left out), with
        relatives also the other columns, and the correlation of each column by protein, of all
        variants and by their number of changes.
    """
    exported.require_proteins("mutations")
    table, source = read_variants(Path(str(config.mutations)), config.variant), str(config.input)
    measured, proteins = table.measured(config.measured), list(read_fasta(Path(source)))
    rows_of = table.rows_by_protein(proteins, source, config.name)
    placed = table.place(proteins, rows_of, config.mutation_offset, config.strict)
    families = _families(config, (protein.name for protein in proteins))
    takes_relatives = families is not None and exported.model.config.relatives_dim is not None
    tokens, check = 0, RelativesCheck(str(config.relatives), source)
    given, paradigms = dict[int, Family](), dict[int, MaskedParadigm]()
    for protein, own in placed.items():
        name, wild_type = proteins[protein].name, proteins[protein].tokens
        if families is not None:
            given[protein] = check.add(name, families[protein], wild_type)
        remedy = "use a model of diffusion, or of flow matching from masks"
        try:
            exported.require_short_enough(f"record {name!r}", wild_type, CUT_PROTEIN, DataError)
            paradigms[protein] = scoring.require_masked(exported.paradigm, "mutations", remedy)
        except D2PLMError as error:
            if families is None or own.sequences is not None:
                raise
            log.info("%s: only its relatives score it (%s)", name, error)
            continue
        for row, sequence in zip(own.rows, own.sequences or (), strict=False):
            what = f"{table.path}, line {table.lines[row]}: the sequence"
            exported.require_short_enough(what, sequence, "remove it", DataError)
        if own.sequences is not None:
            residues = sum(len(one) + 2 for one in (wild_type, *own.sequences))
            passes = 1 + takes_relatives
            tokens += passes * residues * config.evaluation.masks_per_sequence
        else:
            passes = 1 + (scoring.effect_draws(given[protein]) if takes_relatives else 0)
            sites = len(scoring.variants_by_positions(own.variants))
            tokens += passes * (len(wild_type) + 2) * sites
    check.report()
    table.report(placed, [one.name for one in proteins], measured[0] if measured else "")
    model, correlations = exported.denoiser(config.precision), list[dict[str, Any]]()
    scores: dict[str, NDArray[np.float64]] = {}
    with _target(config) as target, Progress("scoring", tokens or None, unit="tokens") as progress:
        settings = _settings(config, exported, progress)
        for protein, own in placed.items():
            name, wild_type = proteins[protein].name, proteins[protein].tokens
            of_model: Callable[..., NDArray[np.float64]] | None = None
            if paradigm := paradigms.get(protein):
                of_model = partial(
                    scoring.mutational_effects, model, paradigm, wild_type, own.variants
                )
                if own.sequences is not None:
                    draws = config.evaluation.masks_per_sequence, config.evaluation.seed
                    of_model = partial(
                        scoring.bound_differences, model, paradigm, wild_type, own.sequences, *draws
                    )
                of_model = partial(of_model, name=name, **settings)
            columns = _by_predictor(
                of_model,
                wild_type,
                own,
                None if families is None else families[protein],
                given[protein] if takes_relatives else None,
                lambda note: progress.update(progress.done, note=note),
            )
            for column, effects in columns.items():
                every = scores.setdefault(column, np.full(len(table.cells), np.nan))
                every[own.rows] = effects
            if measured is not None:
                found = _correlations(name, columns, measured[1][own.rows], own.variants)
                for line in _lines(found):
                    progress.say(line)
                correlations += [one | asdict(one["rho"]) for one in found]
        if target or JSON not in output_modes():
            table.write(target or sys.stdout, scores)
    if config.output is not None:
        number = sum(len(own.rows) for own in placed.values())
        done(f"wrote {config.output} ({counted(number, 'variant')})")
    named = {"model_dir": config.model_dir, "output": config.output}
    ordered = {"scores": scores.pop(SCORE_COLUMN), **scores}
    return {**named, **ordered, "correlations": correlations}


def _by_predictor(
    of_model: Callable[..., NDArray[np.float64]] | None,
    wild_type: NDArray[np.uint8],
    own: Placed,
    family: Family | None,
    given: Family | None,
    note: Callable[[str], None],
) -> dict[str, NDArray[np.float64]]:
    """Compute the effects by column; whole sequences have only the model's.

    Args:
        of_model: lacks the argument `family`; None if the model cannot score the protein.
        family: relatives of the protein; `given`: those that the model is given, if it takes any.
        note: called with a description of each stage.
    """
    if of_model is not None and own.sequences is not None:
        alone = {} if given is None else {ALONE_COLUMN: of_model()}
        return {SCORE_COLUMN: of_model(family=given), **alone}
    from d2plm.families.alignment import letters_of  # imports HMMER
    from d2plm.families.mutation_effects import FamilyEffects, blosum62_effects

    if of_model is not None and family is None:
        blosum62 = blosum62_effects(letters_of(wild_type), own.variants)
        return {SCORE_COLUMN: of_model(), TERM_COLUMNS["blosum62"]: blosum62}
    assert family is not None
    effects = FamilyEffects.of(wild_type, family.members, family.columns, note)
    terms = effects.effects(own.variants)
    columns = {SCORE_COLUMN: terms.pop("score")}
    columns |= {TERM_COLUMNS[name]: term for name, term in terms.items()}
    if of_model is not None:
        columns |= {} if given is None else {MODEL_COLUMN: of_model(family=given)}
        columns[ALONE_COLUMN] = of_model()
    return columns


def _correlations(
    name: str,
    columns: dict[str, NDArray[np.float64]],
    measured: NDArray[np.float64],
    variants: Sequence[Variant],
) -> list[dict[str, Any]]:
    """Rank correlations `rho` of each column, for all variants and by their number of changes."""
    return [
        {
            "name": name,
            "score": column,
            "changes": group,
            "rho": rank_correlation(effects[which], measured[which], [variants[i] for i in which]),
        }
        for column, effects in columns.items()
        for group, which in _by_changes(variants).items()
    ]


def _lines(correlations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines that report the correlations of a protein's scores."""
    rho: dict[str, float] = {}
    for one in correlations:
        group = [one["changes"]] * (one["changes"] != "all")
        yield f"{', '.join([one['name'], one['score'], *group])}: {one['rho']}"
        rho |= {} if group else {one["score"]: one["rho"].rho}
    if rho[SCORE_COLUMN] <= rho.get(TERM_COLUMNS["blosum62"], -1):
        yield (
            f"{correlations[0]['name']}: the score is no better than BLOSUM62, which knows nothing "
            "of this protein; look for more relatives, or check that the measurement rises with "
            "fitness"
        )


def _by_changes(variants: Sequence[Variant]) -> dict[str, NDArray[np.int64]]:
    """Indices of all variants and, if it differs, by their number of changes."""
    changes = np.minimum([len(one.positions) for one in variants], 3)
    found = {"all": np.arange(len(variants))}
    if len({*changes.tolist()} - {0}) > 1:
        groups = enumerate(("1 change", "2 changes", "3 or more changes"), start=1)
        found |= {name: np.flatnonzero(changes == number) for number, name in groups}
    return {name: which for name, which in found.items() if len(which)}


def _families(config: ScoreSettings, names: Iterable[str]) -> list[Family] | None:
    if config.relatives is None:
        return None
    path, most = Path(str(config.relatives)), config.max_relatives
    return read_families(path, most, list(names), str(config.input))


def _settings(config: ScoreSettings, exported: ExportedModel, progress: Progress) -> dict[str, Any]:
    return {
        "token_budget": config.evaluation.token_budget,
        "device": exported.model.device,
        "progress": progress.advance,
    }


def _target(config: ScoreSettings) -> AbstractContextManager[Path | None]:
    """Open the output file, moved into place at the end; None for standard output."""
    return nullcontext() if config.output is None else written_beside(config.output)
