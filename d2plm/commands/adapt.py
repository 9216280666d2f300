"""d2plm adapt: fine-tune a model on a protein family and compare it with every baseline.

The family is split by cluster: most members are for training, some decide when to stop and how far
to move from the base model, and the rest are held out as test members for the comparison.
"""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from d2plm.assembly import adaptation
from d2plm.assembly.new_members import generate_members
from d2plm.assembly.tracked_run import tracked_run
from d2plm.assembly.training_run import with_start_pinned
from d2plm.core.files import write_text
from d2plm.core.terminal import done, result
from d2plm.core.vocabulary import is_canonical
from d2plm.data.family import Family
from d2plm.data.store import clusters_of
from d2plm.evaluation import family_bound
from d2plm.evaluation.new_members import headline, members_table, read_members
from d2plm.evaluation.tables import bounds_table
from d2plm.settings.commands import AdaptSettings


def run(config: AdaptSettings) -> dict[str, Any]:
    """Adapt, compare, generate new members, and write the results into the work folder."""
    config = with_start_pinned(config)
    base = adaptation.open_base(config)
    general = adaptation.general_proteins(config, base.max_residues)
    training = adaptation.split_family(adaptation.training_config(config, base))
    family = adaptation.open_family(training, base)
    adaptation.train(training)
    trained = replace(config, model_dir=training.model_dir)
    adapted, shares = adaptation.interpolate_weights(trained, base, family, general)
    work_dir, masks = Path(config.work_dir), config.evaluation.masks_per_sequence
    splits, proteins = family.prepared.splits, family.proteins("test")
    figures = family_bound.compare_on_family(
        {
            **family_bound.baseline_nats(splits["train"], proteins, base.max_residues),
            **adaptation.family_nats(base, family_bound.BASE, family, masks),
            **adaptation.family_nats(adapted, family_bound.ADAPTED, family, masks),
        },
        np.array([int(is_canonical(tokens).sum()) for tokens in proteins]),
        clusters_of(splits["test"]),
    )
    table = bounds_table(figures, model=family_bound.ADAPTED).markdown()
    said = f"The adapted model is {family_bound.family_verdict(figures)}."
    counts = {split: len(store) for split, store in splits.items()}
    amounts = ", ".join(f"{number} {split}" for split, number in counts.items())
    amounts = f"Members: {amounts}. The figures are computed on the test members."
    family_bound.plot_family(figures, work_dir / "adaptation.png")
    result(f"\n{table}\n\n{said}\n{amounts}\n")
    made = _generate(config, family, work_dir / "members.fasta")
    new = [headline(made), "```", members_table(made).text(), "```"] if made else []
    page = [f"# {config.input}", said, amounts, table, "![perplexities](adaptation.png)"]
    page += ["![new members](members.members.png)"] if made else []
    write_text(work_dir / "adaptation.md", "\n\n".join([*page, "\n".join(new)]) + "\n")
    test = {name: asdict(bound) for name, bound in figures.items()}
    content = {"members": counts, "shares": shares, "test": test, "verdict": said}
    write_text(work_dir / "adaptation.json", json.dumps(content, indent=2))
    with tracked_run(training, "adapt") as tracked:
        perplexities = {name: bound.perplexity.value for name, bound in figures.items()}
        keys = {name: re.sub(r"\W+", "_", name.replace("×", "x")) for name in figures}
        tracked.log_metrics({f"family/{keys[name]}": p for name, p in perplexities.items()})
        for file in ("adaptation.md", "adaptation.json", "adaptation.png"):
            tracked.log_file(work_dir / file, "adaptation")
    done(
        f"wrote {work_dir}/model and {work_dir}/adaptation.md\nnext: d2plm generate "
        f"relatives={config.input} number=100"
    )
    return {"model_dir": str(work_dir / "model"), **content, "generated": made}


def _generate(
    config: AdaptSettings, family: adaptation.SplitFamily, output: Path
) -> dict[str, Any] | None:
    """Generate new members and describe them beside the test members; None if `number` is 0."""
    settings = config.generation
    if not settings.number:
        return None
    given, held_out = (
        Family.of(list(store), 1, names=[store.name(i) for i in range(len(store))])
        for store in (family.prepared.splits["train"], family.prepared.splits["test"])
    )
    generate_members(settings, output, given, held_out)
    return read_members(output)
