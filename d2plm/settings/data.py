"""Settings of data: reading, splitting, similarity searches, and loading for training."""

from dataclasses import dataclass
from typing import Any, Literal

from d2plm.core.errors import require
from d2plm.settings.schema import MAX_SEED, Settings, key, section

EITHER = "either"  # coverage mode: not one of MMseqs2's, but the union of its modes 1 and 2
Format = Literal[
    "auto",
    "fasta",
    "csv",
    "parquet",
    "jsonl",
    "huggingface",
    "lmdb",
    "text",
    "lines",
    "paragraphs",
    "megatron",
]
Alphabet = Literal["protein", "dna", "rna", "codon", "bytes", "tokenizer"]


@dataclass(frozen=True, kw_only=True)
class VocabularySettings(Settings):
    """The alphabet of the sequences."""

    alphabet: Alphabet = key("protein")
    """alphabet; tokenizer: a Hugging Face tokenizer's tokens"""
    tokenizer: str | None = key(None, path="any")
    """tokenizer.json or its folder, for alphabet=tokenizer; null: none, or the prepared data's"""


@dataclass(frozen=True, kw_only=True)
class Reading(Settings):
    """How inputs are read."""

    format: Format = key("auto")
    """format of the input; text: a file is a document"""
    sequence_field: str | None = key(None)
    """column of the sequences, or field of an LMDB's dictionaries; null: a common name"""
    name_field: str | None = key(None)
    """column of the names; null: a common name"""
    on_illegal: Literal["error", "drop"] = key("error")
    """action for a record outside the alphabet"""
    end_of_document: int | None = key(None, low=0)
    """id that ends a Megatron corpus's documents and is left out; null: the tokenizer's"""


@dataclass(frozen=True, kw_only=True)
class IngestedSequences(VocabularySettings, Reading):
    """Which records are kept, and how they are cut."""

    window: int | None = key(None, low=1)
    """tokens of the pieces into which longer sequences are cut; null: no cuts"""
    min_residues: int = key(1, low=1)
    """shorter sequences are left out"""
    max_residues: int | None = key(None, low=1)
    """longer sequences are left out; null: none"""


@dataclass(frozen=True, kw_only=True)
class SplitSettings(Settings):
    """Which sequences are held out, and how their homologs are kept out of training.

    If whole clusters do not add up to a fraction, fewer sequences are held out.
    """

    validation_fraction: float = key(0.005, low=0, below=1)
    """fraction of the distinct sequences to hold out, by cluster"""
    test_fraction: float = key(0.0, low=0, below=1)
    """the same for a test set"""
    validation_ids: str | None = key(None, path="file")
    """file of identifiers to hold out instead, one per line"""
    test_ids: str | None = key(None, path="file")
    """the same for the test set"""
    exclude_homologs_of: list[str] = key([], path="any")
    """stores or FASTA whose homologs are excluded from training"""
    split_seed: int = key(0, low=0, high=MAX_SEED)
    """seed that chooses the held-out clusters"""
    search_directions: Literal["both", "from_held_out", "from_training"] = key("both")
    """directions of MMseqs2's searches; from_held_out is several times faster"""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.validation_fraction > 0 or self.validation_ids is not None
        require(fits, "validation_fraction", self.validation_fraction, "a number > 0 and < 1")


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(Settings):
    """Homology clustering by MMseqs2.

    `cluster` finds remote homologs by cascaded searches (one search for up to 20 proteins);
    `linclust` takes linear time, for hundreds of millions of sequences; `none` makes every sequence
    its own cluster, for a collection that is already clustered, such as UniRef50.
    """

    method: Literal["cluster", "linclust", "none"] = key("cluster")
    """clustering; none: clustered already, such as UniRef50"""
    min_seq_id: float = key(0.3, low=0, high=1)
    """least identity of the members of a cluster"""
    coverage: float = key(0.8, low=0, high=1)
    """least fraction of both sequences that the alignment covers"""


@dataclass(frozen=True, kw_only=True)
class SearchSettings(Settings):
    """The search that defines homologs.

    The defaults are those of the ESM-2 paper's split except for its coverage of both sequences (0),
    which misses proteins that contain another one or are contained in it.
    """

    min_seq_id: float = key(0.5, low=0, high=1)
    """least identity of a homolog"""
    coverage: float = key(0.8, low=0, high=1)
    """least fraction of the sequences that the alignment covers"""
    coverage_mode: int | Literal["either"] = key(EITHER, low=0, high=5)
    """sequences to cover: either, or the number of an MMseqs2 mode; 0: both, as for ESM-2"""
    alignment_mode: int = key(3, low=0, high=4)
    """3: the identity is computed from the whole alignment"""
    sensitivity: float = key(7.0, low=1, high=7.5)
    """sensitivity of MMseqs2's prefilter, 1 (fast) … 7.5 (sensitive)"""
    max_seqs: int = key(300, low=1)
    """prefilter results kept for each query"""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.alignment_mode >= 2 or self.coverage_mode != EITHER
        wanted = "an integer ≥ 2 with coverage_mode=either, which needs the alignment's start"
        require(fits, "alignment_mode", self.alignment_mode, wanted)


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """Which documents are near-duplicates."""

    near_duplicate_similarity: float | None = key(0.75, above=0, high=1)
    """least Jaccard similarity of near-duplicates (n-grams of 25 bytes or 5 tokens); null: off"""
    overlap_ngram: int | None = key(None, low=1)
    """tokens of an n-gram that texts do not share by chance; null: 50 bytes, or 13 tokens"""
    overlap_share: float = key(0.5, above=0, high=1)
    """texts overlap if they share this fraction of the n-grams of either"""


@dataclass(frozen=True, kw_only=True)
class Resources(Settings):
    """Resources of MMseqs2, and the maximum wait for another process."""

    threads: int | None = key(None, low=1)
    """CPU threads of MMseqs2; null: all"""
    memory_limit: str | None = key(None)
    """memory of MMseqs2, such as 48G; null: all memory of the machine"""
    temporary_dir: str | None = key(None, path="folder")
    """folder of temporary files, several times the input; null: beside the results"""
    max_wait_seconds: float | None = key(None, low=0)
    """seconds to wait for another process in the same folder; null: until it ends"""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings(Settings):
    """How batches are packed and loaded."""

    token_budget: int = key(16384, low=3)
    """tokens of a bin, the unit of packing"""
    max_length: int | None = key(None, low=3)
    """maximum tokens of a sequence, with <cls> and <eos>; longer ones are cropped; null: the
    model's limit"""
    max_relatives: int | None = key(None, low=1)
    """relatives drawn for a protein, for a model with relatives_dim; null: none"""
    num_workers: int = key(0, low=0)
    """loader processes; 0 loads in the training process"""
    prefetch_factor: int = key(4, low=1)
    """batches that each worker holds ready"""
    async_prefetch: bool = key(True)
    """copy the next batch to the GPU while one is computed"""


@dataclass(frozen=True, kw_only=True)
class DataSettings(IngestedSequences, SplitSettings, TextSettings, Resources, LoaderSettings):
    """From proteins, other sequences or texts (or a raw store) to packed batches."""

    input: str | list[str] | None = key(None, path="any")
    """any input of d2plm ingest, or a raw store"""
    license: str | None = key(None)
    """license for the model card, such as CC-BY-4.0"""
    prepared_dir: str = key("${work_dir}/data", path="folder")
    """folder of the stores that prepare writes and training reads"""
    keep_prepared: bool = key(False)
    """prepare reuses existing prepared data, from any input"""
    cluster: ClusterSettings = section(ClusterSettings)
    search: SearchSettings = section(SearchSettings)
    relatives_sensitivity: float | None = key(None, low=1, high=7.5)
    """sensitivity of the search for training proteins' relatives; null: no search"""
    sampling: Literal["sequence", "cluster"] = key("sequence")
    """what an epoch draws; cluster: one member of each cluster"""
    mixture: dict[str, Any] | None = key(None)
    """{name: {prepared_dir: FOLDER, weight: 0.7}, …}; fractions of the draws"""
    residues: Literal["real", "shuffled", "random"] = key("real")
    """shuffled: a control, composition without order; random: needs no prepared data"""


@dataclass(frozen=True, kw_only=True)
class RetrievalSettings(Settings):
    """Which hits of a search become the relatives of a protein."""

    identity_below: float = key(1.0, above=0, high=1)
    """hits at least this identical to the protein are left out"""
    min_coverage: float = key(0.0, low=0, high=1)
    """least fraction of the protein that the alignment covers"""
    max_relatives: int = key(8, low=1)
    """maximum number of relatives per protein, the most significant first"""
    mutual_identity_below: float | None = key(0.9, above=0, high=1)
    """hits at least this identical to an earlier relative are left out; null: none"""
    sensitivity: float = key(7.0, low=1, high=7.5)
    """sensitivity of the search, 1 (fast) … 7.5 (sensitive)"""
    max_e_value: float = key(1e-3, above=0)
    """largest E-value of a hit"""
