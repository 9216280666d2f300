"""Settings of the evaluation and of generation."""

from dataclasses import dataclass
from typing import Any, Literal

from d2plm.core.errors import require
from d2plm.settings.schema import MAX_SEED, Settings, key


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """The likelihood bound on held-out sequences, and the quality of generated ones."""

    split: Literal["validation", "test"] = key("validation")
    """held-out set to evaluate on"""
    masks_per_sequence: int = key(16, low=1)
    """draws of masks for each sequence; more give a steadier estimate"""
    seed: int = key(0, low=0, high=MAX_SEED)
    """seed of the masks"""
    token_budget: int = key(16384, low=1)
    """tokens of a forward pass"""
    compare_with: list[str] = key([], path="any")
    """exports or Hugging Face masked language models to compare on the same masks"""
    nearest_identity: bool = key(True)
    """bound by identity to the nearest training protein (an MMseqs2 search, once)"""
    nearest_sensitivity: float = key(7.0, low=1, high=7.5)
    """sensitivity of that search, also for generated proteins"""
    relatives_below: list[float] = key([0.9, 0.7, 0.5], above=0, high=1)
    """identities below which relatives are given, to a model that takes them; []: none"""
    max_relatives: int = key(8, low=1)
    """maximum number of relatives per protein, the most significant first"""
    relatives_depths: list[int] = key([], low=1)
    """numbers of relatives, for the bound by depth below the first of the identities; []: none"""
    relatives_proteins: int | None = key(None, low=1)
    """evenly spaced proteins for the bounds given relatives; null: all"""
    relatives_masks: int = key(2, low=1)
    """draws of masks for the bounds given relatives"""
    relatives_sensitivity: float = key(7.0, low=1, high=7.5)
    """sensitivity of the search for relatives among the held-out proteins"""
    generated: int = key(200, low=0)
    """sequences to generate and evaluate, without relatives; 0: none"""

    def __post_init__(self) -> None:
        super().__post_init__()
        falling = self.relatives_below == sorted({*self.relatives_below}, reverse=True)
        require(falling, "relatives_below", self.relatives_below, "strictly decreasing numbers")


@dataclass(frozen=True, kw_only=True)
class SamplerSettings(Settings):
    """The sampler and its options; a sampler rejects those of others."""

    sampler: Literal["ancestral", "euler", "first_hitting", "confidence", "remdm"] | None = key(
        None
    )
    """sampler; null: the paradigm's default"""
    steps: int | None = key(None, low=1)
    """steps (none for first_hitting), each at most one evaluation; null: the paradigm's default"""
    temperature: float | None = key(None, above=0)
    """divides the logits; below 1 is more conservative; null: 1, for new members 0.76 or less"""
    top_k: int | None = key(None, low=1)
    """keep only the k most likely tokens; null: all"""
    top_p: float = key(1.0, above=0, high=1)
    """keep the most likely tokens that reach this probability"""
    corrector: float = key(0.0, low=0)
    """peak strength of euler's corrector, which corrupts tokens again"""
    remask: bool = key(False)
    """for confidence: tokens filled in earlier compete again"""
    remdm_schedule: Literal["cap", "rescale"] = key("cap")
    """schedule of remdm"""
    remdm_eta: float | None = key(None, low=0, high=1)
    """strength of remdm; null: 0.008 for cap, 0.015 for rescale"""
    seed: int = key(0, low=0, high=MAX_SEED)
    """seed of all draws"""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(SamplerSettings):
    """How sequences are generated, by d2plm generate, the pipeline and evaluations."""

    number: int = key(10, low=0)
    """number of sequences, per length or template if given; 0: none, for adapt"""
    length: int | list[int] | None = key(None, low=1)
    """lengths in tokens (residues), a number or a list; null: the training sequences'"""
    min_length: int = key(1, low=1)
    """minimum of drawn lengths, tokens"""
    max_length: int | None = key(None, low=1)
    """maximum of drawn lengths, tokens; null: the model's limit"""
    relatives: str | None = key(None, path="any")
    """a family (any input of d2plm ingest): new members from its alignment, without a model"""
    identity: float | None = key(None, above=0, high=1)
    """for new members: median identity to the nearest given member; null: about that of natural
    members, 0.65 to 0.85"""
    keep: list[str] = key([])
    """for new members: residues to keep, each NAME:H57,D102,S195-S200"""
    avoid: str = key("")
    """for new members: residues to avoid, such as C"""
    near: str | None = key(None)
    """for new members: NAME:10, the member and the number of mutations"""
    filter: bool = key(False)
    """for new members: redraw those unlike natural members, and report their number"""
    templates: str | None = key(None, path="file")
    """FASTA with '_' or '<mask>' for each residue or base, '___' for a codon; text: .jsonl or .txt,
    a template a line, '<mask:12>' for 12 tokens"""
    prompt: Any = key(None)
    """beginning of each sequence, counted in its length"""
