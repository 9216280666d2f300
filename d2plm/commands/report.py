"""d2plm report: an HTML page about a run, its evaluation and its generated sequences.

The page is made from the files in the run's folder. Generated proteins are scored and searched for
in the training data once; the result is kept beside them.
"""

import logging
from pathlib import Path

from d2plm.assembly.preparation import resources
from d2plm.assembly.tracked_run import tracked_run
from d2plm.config import read
from d2plm.core.files import RUN_CONFIG
from d2plm.core.terminal import done
from d2plm.data.manifest import MANIFEST, open_prepared
from d2plm.evaluation.new_members import read_members
from d2plm.evaluation.result import EVALUATION, read_evaluation
from d2plm.evaluation.terms import SUITES
from d2plm.export.designs import FASTA, describe_designs
from d2plm.export.exported_model import PROVENANCE, ExportedModel
from d2plm.export.report_content import Sources
from d2plm.export.report_page import write_report
from d2plm.settings.commands import PipelineSettings, ReportSettings
from d2plm.settings.data import Resources
from d2plm.settings.schema import part
from d2plm.tracking.locations import open_export

DESCRIBED_AS = ("seed", "precision", "token_budget", "nearest_sensitivity")  # evaluation settings

log = logging.getLogger(__name__)


def run(config: ReportSettings) -> Path:
    """Describe the generated proteins, if any, write the page and return its path."""
    output_dir = Path(config.output_dir)
    file = output_dir / RUN_CONFIG
    written: PipelineSettings | None = read("train", file) if file.is_file() else None
    likely = (written.model_dir, written.data.prepared_dir) if written else (None, None)
    sources = Sources(
        output_dir,
        model_dir=_folder(PROVENANCE, config.model_dir, output_dir / "model", likely[0]),
        prepared_dir=_folder(MANIFEST, config.prepared_dir, likely[1], output_dir.parent / "data"),
    )
    describable = (
        output_dir / FASTA,
        output_dir / EVALUATION,
        sources.model_dir / PROVENANCE,
        sources.prepared_dir / MANIFEST,
    )
    absent = [file for file in describable if not file.is_file()]
    if not absent:
        exported = open_export(sources.model_dir, config.device)
        mmseqs = part(Resources, config)
        _describe(sources, exported, mmseqs)
    elif (output_dir / FASTA).is_file():
        log.warning("%s is left out because %s is missing", output_dir / FASTA, absent[0])
    report = write_report(sources)
    done(f"wrote {report}")
    return report


def report_on_proteins(config: PipelineSettings, exported: ExportedModel) -> None:
    """Describe the generated proteins of a finished run, write the page and log it."""
    output_dir = Path(config.output_dir)
    sources = Sources(output_dir, exported.folder, Path(config.data.prepared_dir))
    _describe(sources, exported, resources(config))
    report = write_report(sources)
    with tracked_run(config, "report") as tracked:
        tracked.log_file(report, "report")
    done(f"wrote {report}")


def _describe(sources: Sources, exported: ExportedModel, mmseqs: Resources) -> None:
    """Describe the generated proteins with the settings of the evaluation, which must exist."""
    evaluation = read_evaluation(sources.output_dir)
    assert evaluation is not None
    settings, stores = evaluation.settings, open_prepared(sources.prepared_dir).splits
    if not SUITES[stores["train"].vocabulary.name].homology:
        return  # no search finds the nearest training sequence
    of_a_family = read_members(sources.output_dir / FASTA) is not None
    describe_designs(
        sources.output_dir,
        exported,
        stores["train"],
        stores[settings["split"]],
        **{name: settings[name] for name in DESCRIBED_AS},
        compare=evaluation.quality is None and not of_a_family,
        resources=mmseqs,
        report=log.info,
    )


def _folder(holding: str, named: str | None, *likely: str | Path | None) -> Path:
    """The named folder, else the first likely one that contains `holding`, else the last one."""
    if named is not None:
        return Path(named)
    folders = [Path(folder) for folder in likely if folder is not None]
    return next((folder for folder in folders if (folder / holding).is_file()), folders[-1])
