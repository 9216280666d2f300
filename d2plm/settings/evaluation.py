"""Settings of the evaluation and of generation."""

from dataclasses import dataclass
from typing import Any, Literal

from d2plm.settings.schema import Settings, key


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """The likelihood bound on held-out sequences, and the quality of generated ones."""

    split: Literal["validation", "test"] = key("validation", "held-out set to evaluate on")
    masks_per_sequence: int = key(
        16, "draws of masks for each sequence; more give a steadier estimate", low=1
    )
    seed: int = key(0, "seed of the masks", low=0)
    token_budget: int = key(16384, "tokens of a forward pass", low=1)
    compare_with: list[str] = key(
        [],
        "folders of exports or of Hugging Face masked language models to compare on the same "
        "tokens "
        "and masks",
        path="any",
    )
    nearest_identity: bool = key(
        True,
        "compute the bound by identity to the nearest training protein (an MMseqs2 search, once)",
    )
    nearest_sensitivity: float = key(
        7.0, "sensitivity of that search and of the search for generated proteins", low=1, high=7.5
    )
    relatives_below: list[float] = key(
        [0.9, 0.7, 0.5],
        "identities below which relatives are given, for a model that takes relatives; []: none",
        above=0,
        high=1,
    )
    max_relatives: int = key(
        8, "maximum number of relatives per protein, the most significant first", low=1
    )
    relatives_proteins: int | None = key(
        None,
        "number of evenly spaced held-out proteins for the bounds given relatives; null: all",
        low=1,
    )
    relatives_masks: int = key(2, "draws of masks for the bounds given relatives", low=1)
    relatives_sensitivity: float = key(
        7.0, "sensitivity of the search for relatives among the held-out proteins", low=1, high=7.5
    )
    generated: int = key(
        200,
        "number of sequences to generate and evaluate, with the generation settings but without "
        "relatives; 0: none",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class SamplerSettings(Settings):
    """The sampler and its options; a sampler refuses those of others."""

    sampler: Literal["ancestral", "euler", "first_hitting", "confidence", "remdm"] | None = key(
        None, "sampler; null: the paradigm's default"
    )
    steps: int | None = key(
        None,
        "steps of the sampler, each at most one model evaluation; null: the paradigm's default; "
        "first_hitting has none",
        low=1,
    )
    temperature: float = key(1.0, "divides the logits; below 1 is more conservative", above=0)
    top_k: int | None = key(None, "keep only the k most likely tokens; null: all", low=1)
    top_p: float = key(
        1.0, "keep the most likely tokens that together reach this probability", above=0, high=1
    )
    corrector: float = key(
        0.0, "peak strength of euler's corrector, which corrupts tokens again", low=0
    )
    remask: bool = key(False, "for confidence: tokens filled in earlier compete again")
    remdm_schedule: Literal["cap", "rescale"] = key("cap", "schedule of remdm")
    remdm_eta: float | None = key(
        None, "strength of remdm; null: 0.008 for cap, 0.015 for rescale", low=0, high=1
    )
    seed: int = key(0, "seed of all draws", low=0)


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(SamplerSettings):
    """How sequences are generated, by d2plm generate, the pipeline and evaluations."""

    number: int = key(
        10, "number of sequences; with lengths or templates, the number for each", low=1
    )
    length: int | list[int] | None = key(
        None,
        "lengths in tokens (residues), a number or a list; null: drawn from the training "
        "sequences' "
        "lengths",
        low=1,
    )
    min_length: int = key(1, "minimum of drawn lengths, tokens", low=1)
    max_length: int | None = key(
        None, "maximum of drawn lengths, tokens; null: the model's limit", low=1
    )
    relatives: str | None = key(
        None,
        "FASTA of a family, for a model that takes relatives: generate new members with lengths of "
        "the family",
        path="file",
    )
    max_relatives: int = key(8, "relatives drawn for each protein", low=1)
    held_out_members: float = key(
        0.2,
        "fraction of a family of at least ten that is not given but compared with the new members; "
        "0: none",
        low=0,
        below=1,
    )
    templates: str | None = key(
        None,
        "FASTA with '_' or '<mask>' for each residue or base to design, '___' for a codon; for "
        "text: "
        ".jsonl or .txt with a template a line, '<mask:12>' for 12 tokens",
        path="file",
    )
    prompt: Any = key(None, "beginning of each sequence, which counts towards its length")
