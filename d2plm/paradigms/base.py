"""What a paradigm is: a corruption process, its training loss, its bound, its sampler's transition.

A new paradigm is one file and one YAML. Special tokens, padding and the non-canonical letters are
never corrupted and never a target; the model's distribution is a 20-way softmax over the canonical
residues.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from diffusers.configuration_utils import ConfigMixin
from torch import Tensor

from d2plm.batch import PackedBatch
from d2plm.noise import Key

# (tokens [T], cu_seqlens [S+1], max_seqlen, times [S]) → logits [T, V]
Denoiser = Callable[[Tensor, Tensor, int, Tensor], Tensor]


@dataclass(frozen=True)
class Corrupted:
    """A corrupted batch and what is to be learnt from it.

    Attributes:
        tokens: uint8 [T], the noised tokens.
        targets: int64 [T], index of the clean residue among the twenty; 0 where the weight is 0.
        times: float32 [S], the paradigm's time of each segment, in [0, 1].
        weights: float32 [T], weight of each position's cross-entropy; 0 where it is no target.
        count: float64 scalar, this batch's share of the global batch's normaliser.
    """

    tokens: Tensor
    targets: Tensor
    times: Tensor
    weights: Tensor
    count: Tensor


class Paradigm(ConfigMixin, ABC):
    """Everything that training, evaluation and sampling ask of a paradigm.

    Times are those of the paradigm's own paper, scaled to [0, 1].

    Attributes:
        name: in folders, experiments and messages.
        prior_time: where nothing of the protein is left; `data_time`: where all of it is.
        samplers: those that are defined for it, its own first.
        default_steps, max_steps: of a sampler.
    """

    config_name = "paradigm_config.json"
    name: str
    prior_time: float
    data_time: float
    samplers: tuple[str, ...]
    default_steps: int
    max_steps: int

    @abstractmethod
    def corrupt(self, batch: PackedBatch, key: Key) -> Corrupted:
        """Corrupt a batch at random times; every draw is keyed by `key` and `batch.draw_ids`."""

    @abstractmethod
    def loss(
        self, logits: Tensor, batch: PackedBatch, corrupted: Corrupted
    ) -> tuple[Tensor, Tensor]:
        """(weighted sum of cross-entropies [nats], its normaliser).

        The training loss is the sum over all micro-batches and ranks of the first, divided by that
        of the second: a gradient does not depend on how the global batch was cut.
        """

    @abstractmethod
    def bound(
        self,
        model: Denoiser,
        batch: PackedBatch,
        key: Key,
        *,
        draw: int = 0,
        draws: int = 1,
        control: Tensor | None = None,
    ) -> Tensor:
        """An estimate of the NELBO of each sequence, nats, float64 [S].

        The mean over `draw` = 0 … `draws` − 1 is unbiased; each draw is one stratum.

        Args:
            key: keys the draws; with `batch.draw_ids` = sequence ids they are the same for every
                model.
            control: −log of a unigram model's probabilities [20], float64, as a control variate:
                lower variance, the same expectation.
        """

    @abstractmethod
    def cross_entropy(
        self, model: Denoiser, batch: PackedBatch, masked: Tensor, fraction: Tensor
    ) -> Tensor:
        """float64 [T]: −log p of each masked residue given the others; 0 elsewhere.

        Args:
            masked: bool [T], a subset of the maskable residues.
            fraction: float64 [S], the share of each sequence that is masked; the model is told the
                time that belongs to it.
        """

    @abstractmethod
    def maskable(self, batch: PackedBatch) -> Tensor:
        """bool [T]: the residues that may be corrupted and predicted."""

    @abstractmethod
    def transition(self, start: float, stop: float) -> float:
        """Probability that a residue still corrupted at `start` is clean by `stop`."""

    @abstractmethod
    def mask_fraction(self, times: Tensor) -> Tensor:
        """The probability that a residue is corrupted at `times`, same shape, float64."""

    @abstractmethod
    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Logits [T, V] → log-probabilities [T, 20] of the residue *at* each position.

        In fp32, or fp64 where the logits are.
        """
