"""Adapting a model to one family: splitting the family, training, and interpolating the weights.

A fine-tuned model is better on its family and worse on other proteins. Linear interpolation
between the base weights and the trained ones trades one for the other (Wortsman et al.,
arXiv:2109.01903). Among the interpolations that stay within a limit on general proteins, the one
with the best bound on the family's validation members is chosen. The test members are not used.
"""

import copy
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree

import numpy as np
from numpy.typing import NDArray

from d2plm.assembly.preparation import prepare_data, resources
from d2plm.assembly.training_run import build_paradigm, load_start, refuse_adapter
from d2plm.config import save
from d2plm.core.errors import DataError, ModelError, SplitError
from d2plm.core.files import shipped, written_beside
from d2plm.core.processes import train_locally
from d2plm.core.progress import Progress
from d2plm.core.vocabulary import PROTEIN
from d2plm.data.manifest import PreparedData, is_prepared, open_prepared
from d2plm.data.retrieval import retrieve_relatives
from d2plm.data.sources import read_sequences
from d2plm.evaluation.likelihood import score_sequences
from d2plm.export.export_callback import ADAPTER
from d2plm.export.exported_model import ExportedModel, load_export, read_provenance, save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.lora import scale_adapter
from d2plm.paradigms.paradigm import Denoiser
from d2plm.settings.commands import AdaptSettings
from d2plm.settings.data import RetrievalSettings
from d2plm.settings.registry import module_words
from d2plm.tracking.locations import model_folder, open_export, say_if_shipped

IDENTITIES = (0.3, 0.5, 0.7, 0.9)  # tried in this order
# Minimum test clusters, and minimum fraction of members for training, of a suitable split.
FEWEST_CLUSTERS, LEAST_TRAINED = 5, 0.5
INTERPOLATIONS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1)  # from base (0) to trained (1)
GENERAL_MASKS = 1

Tokens = NDArray[np.uint8]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplitFamily:
    """The members of a family by split, and the relatives of the held-out members.

    Attributes:
        relatives: split → for each member, the nearest training members; None for a model that
            takes no relatives.
        longest: maximum number of residues that are scored per protein.
    """

    prepared: PreparedData
    relatives: dict[str, list[list[Tokens]]] | None
    longest: int

    def proteins(self, split: str) -> list[Tokens]:
        """The members of a split, cut to the model's maximum length."""
        return [tokens[: self.longest] for tokens in self.prepared.splits[split]]


def open_base(config: AdaptSettings) -> ExportedModel:
    """Open the model to adapt: an export, or ESM-2 with the configured paradigm.

    Raises:
        ModelError: if the folder is neither, or is incomplete.
    """
    device, uri = config.trainer.device, config.tracking.uri
    say_if_shipped(config.init_from, "init_from")
    folder = model_folder(config.init_from, uri, key="init_from")
    refuse_adapter(folder, config.init_from)
    if not folder.is_dir() or read_provenance(folder) is not None:
        base = open_export(folder, device, uri)
        base.require_proteins("init_from")
        return base
    _, start = load_start(config)  # adds the time embedding
    assert start is not None
    longest = start.model.config.max_position_embeddings - 2
    anything = LengthHistogram.of(np.array([longest]), longest)
    return ExportedModel(folder, start.model.eval(), build_paradigm(config), anything, {})


def training_config(config: AdaptSettings, base: ExportedModel) -> AdaptSettings:
    """Configure training with the base's paradigm, and with relatives if the base takes them."""
    takes = base.model.config.relatives_dim is not None
    data = replace(config.data, input=config.input)
    if not takes:
        data = replace(data, max_relatives=None, relatives_sensitivity=None)
    config = replace(config, data=data)
    if base.provenance:
        settings = replace(base.paradigm.settings, name=base.paradigm.name)
        config = replace(config, paradigm=settings)
    return config


def split_family(config: AdaptSettings) -> AdaptSettings:
    """Split the family by clusters at the configured identity, or at the lowest suitable one.

    Members with this identity over most of the shorter one are always in the same split. Returns
    the configuration with the folder of the prepared family.

    Raises:
        DataError: if the family has too few members, or all are too similar.
    """
    for tried in IDENTITIES if config.identity == "auto" else (config.identity,):
        folder = Path(config.work_dir) / "data" / f"below_{100 * tried:.0f}"
        data = replace(
            config.data,
            cluster=replace(config.data.cluster, min_seq_id=tried),
            search=replace(config.data.search, min_seq_id=tried),
            prepared_dir=str(folder),
        )
        split = replace(config, data=data)
        try:
            counts = prepare_data(split)["counts"]
        except SplitError as error:
            log.info("at %.0f %% identity the family cannot be split: %s", 100 * tried, error)
            continue
        enough = counts.get("test_clusters", 0) >= FEWEST_CLUSTERS
        if (enough and counts["train_sequences"] >= LEAST_TRAINED * counts["distinct"]) or (
            config.identity != "auto" and "test_sequences" in counts
        ):
            return split
        log.info("at %.0f %% identity too few members are left for training", 100 * tried)
        if counts["distinct"] * data.test_fraction <= FEWEST_CLUSTERS - 1:
            break  # too few even if each held-out member were its own cluster
    raise DataError(
        f"{config.data.input}: the family cannot be split by clusters: it has too few "
        "members, or all are too similar; add members, or set identity (such as 0.7), which "
        f"accepts fewer than {FEWEST_CLUSTERS} test clusters, or generate new members without "
        f"training: d2plm generate generation.relatives={config.data.input}; for variants of one "
        "protein: d2plm score input=WILD_TYPE.fasta mutations=VARIANTS.csv"
    )


def open_family(config: AdaptSettings, base: ExportedModel) -> SplitFamily:
    """Open the prepared family and find the relatives of its held-out members."""
    folder, found = Path(config.data.prepared_dir), None
    prepared = open_prepared(folder)
    if base.model.config.relatives_dim is not None:
        most = config.data.max_relatives or RetrievalSettings().max_relatives
        wanted = RetrievalSettings(max_relatives=most)
        found = {}
        for split in ("validation", "test"):
            members = list(prepared.splits[split])
            related = retrieve_relatives(
                members, folder, folder / "retrieval", wanted, resources=resources(config)
            )
            found[split] = [[one.tokens for one in own] for own in related]
    return SplitFamily(prepared, found, base.max_residues)


def train(config: AdaptSettings) -> None:
    """Train in separate processes; an interrupted training run continues."""
    file = Path(config.output_dir) / "config.requested.yaml"
    save(config, file)
    train_locally(file, config.distributed.processes, module_words())


def general_proteins(config: AdaptSettings, longest: int) -> list[Tokens]:
    """Read the general proteins in `general`, cut to `longest` residues."""
    path = shipped(str(config.general))
    if is_prepared(path):
        return [tokens[:longest] for tokens in open_prepared(path).splits["validation"]]
    return [record.tokens[:longest] for record in read_sequences(path, PROTEIN)]


def nats(
    model: Denoiser,
    exported: ExportedModel,
    proteins: list[Tokens],
    relatives: list[list[Tokens]] | None = None,
    masks: int = GENERAL_MASKS,
) -> NDArray[np.float64]:
    """Compute each protein's bound in nats, float64 [N], with the same masks for every model."""
    return score_sequences(
        model,
        exported.paradigm,
        proteins,
        masks_per_sequence=masks,
        max_length=exported.max_length,
        relatives=relatives,
        device=exported.model.device,
        with_mlm15=False,
    ).nats


def interpolate_weights(
    config: AdaptSettings, base: ExportedModel, family: SplitFamily, general: list[Tokens]
) -> tuple[ExportedModel, list[dict[str, float]]]:
    """Interpolate between the base and the trained weights; export into `work_dir/model`.

    Args:
        general: proteins on which the bound may worsen only up to a limit.

    Returns:
        The model, and for each interpolation the loss on general proteins and the bound of the
        validation members, in nats per residue.

    Raises:
        ModelError: if even the interpolation nearest to the base exceeds the limit.
    """
    most, masks = config.max_general_loss, config.evaluation.masks_per_sequence
    trained = load_export(config.model_dir, base.model.device)
    members = family.proteins("validation")
    relatives = None if family.relatives is None else family.relatives["validation"]
    residues = {"general": sum(map(len, general)), "members": sum(map(len, members))}
    before, after = base.model.state_dict(), trained.model.state_dict()
    mixed, between, rows = copy.deepcopy(trained.model), {}, []
    alone = nats(base.denoiser(), base, general)
    with Progress("choosing the interpolation", len(INTERPOLATIONS)) as progress:
        for share in INTERPOLATIONS:
            between[share] = {
                name: one + share * (after[name] - one) for name, one in before.items()
            }
            mixed.load_state_dict(between[share])
            model = replace(trained, model=mixed).denoiser()
            loss = (nats(model, base, general) - alone).sum() / residues["general"]
            bound = nats(model, base, members, relatives, masks).sum() / residues["members"]
            rows.append({"share": share, "general_loss": loss, "validation_nelbo": bound})
            progress.advance(1)
    allowed = [row for row in rows if row["general_loss"] <= most]
    if not allowed:
        raise ModelError(
            f"even {INTERPOLATIONS[-1]:.0%} of the way to the trained weights, the model loses "
            f"{rows[-1]['general_loss']:.3f} nats per residue on general proteins, more than "
            f"max_general_loss={most}; reduce trainer.max_steps and optimizer.learning_rate, or "
            "raise the limit"
        )
    chosen = min(allowed, key=lambda row: row["validation_nelbo"])
    log.info(
        "chose %.0f %% of the way from the base to the trained weights: %+.4f nats per residue on "
        "general proteins (at most %+.3f)",
        *(100 * chosen["share"], chosen["general_loss"], most),
    )
    folder = Path(config.work_dir) / "model"
    provenance = {**trained.provenance, "adaptation": chosen}
    content = (trained.paradigm, trained.lengths, provenance)
    save_export(folder, trained.model, *content, between[chosen["share"]])
    adapter = Path(config.model_dir).with_name(ADAPTER)
    if adapter.is_dir():
        with written_beside(folder.with_name(ADAPTER)) as partial:
            copytree(adapter, partial)
            scale_adapter(partial, chosen["share"])
    return load_export(folder, base.model.device), rows


def family_nats(
    exported: ExportedModel, name: str, family: SplitFamily, masks: int
) -> dict[str, NDArray[np.float64]]:
    """Compute the bounds of the test members by `name`; with relatives, also without them."""
    model, members = exported.denoiser(), family.proteins("test")
    if family.relatives is None:
        return {name: nats(model, exported, members, masks=masks)}
    return {
        f"{name}, alone": nats(model, exported, members, masks=masks),
        name: nats(model, exported, members, family.relatives["test"], masks),
    }
