"""d2plm adapt: a model and a family → a model of the family, beside every baseline, and new members.

The family is split by clusters: most members are trained on, some decide when to stop and how far
to go from the base model, and the rest, which decide nothing, are what the result is measured on.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from d2plm.assembly.adaptation import (
    Family,
    family_nats,
    go_part_of_the_way,
    open_base,
    open_family,
    split_family,
    train,
    training_config,
)
from d2plm.assembly.generation import generate
from d2plm.config import Config
from d2plm.core.alphabet import is_canonical
from d2plm.core.errors import require
from d2plm.core.files import write_text
from d2plm.core.terminal import done, result
from d2plm.data import family as members
from d2plm.data.store import clusters_of
from d2plm.evaluation.family_bound import (
    ADAPTED,
    BASE,
    baseline_nats,
    compare_on_family,
    family_table,
    plot_family,
    verdict,
)
from d2plm.export.exported_model import ExportedModel

log = logging.getLogger(__name__)


def run(config: Config) -> dict[str, Any]:
    """Adapt, compare, generate new members, and write what was found into the work folder."""
    require(config["input"] is not None, "input", None, "the family's proteins, such as FASTA")
    base = open_base(config)
    training = split_family(training_config(config, base), config["identity"])
    family = open_family(training, base)
    train(training)
    values = {**config.values, "model_dir": training["model_dir"]}
    adapted, shares = go_part_of_the_way(Config(values), base, family)
    work_dir, masks = Path(config["work_dir"]), config["evaluation"]["masks_per_sequence"]
    test, proteins = family.prepared.splits["test"], family.proteins("test")
    figures = compare_on_family(
        {
            **baseline_nats(family.prepared.splits["train"], proteins, base.max_residues),
            **family_nats(base, BASE, family, masks),
            **family_nats(adapted, ADAPTED, family, masks),
        },
        np.array([int(is_canonical(tokens).sum()) for tokens in proteins]),
        clusters_of(test),
    )
    table, said = family_table(figures), f"The adapted model is {verdict(figures)}."
    counts = {split: len(store) for split, store in family.prepared.splits.items()}
    content = {"members": counts, "shares": shares, "test": figures, "verdict": said}
    write_text(work_dir / "adaptation.json", json.dumps(content, indent=2))
    write_text(work_dir / "adaptation.md", f"{said}\n\n{table}\n")
    plot_family(figures, work_dir / "adaptation.png")
    amounts = ", ".join(f"{number} {split}" for split, number in counts.items())
    result(f"\n{table}\n\n{said}\nMembers: {amounts}; the figures are of the test members.")
    _generate(config, adapted, family, work_dir / "members.fasta")
    done(
        f"wrote {work_dir}/model, adaptation.md and adaptation.png\n"
        f"next: d2plm generate model_dir={work_dir}/model generation.number=100"
    )
    return content


def _generate(config: Config, adapted: ExportedModel, family: Family, output: Path) -> None:
    """New members, described beside the test members."""
    most = config["generation"]["max_relatives"]
    sets = [
        members.Family.of(list(store), most, names=[store.name(i) for i in range(len(store))])
        for store in (family.prepared.splits["train"], family.prepared.splits["test"])
    ]
    if config["generation"]["number"]:
        generate(adapted, config["generation"], output, config["trainer"]["precision"], (*sets,))
