"""What a paradigm is: a corruption process, its training loss, its bound, and what samplers ask.

A new paradigm is one file, its line in `PARADIGMS` and one YAML. Special tokens, padding and the
non-canonical letters are never corrupted and never a target; the model's distribution is a 20-way
softmax over the canonical residues. Every paradigm corrupts each residue independently: with some
probability, which grows towards the prior, its place is taken by a token of the source.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from diffusers.configuration_utils import ConfigMixin
from torch import Tensor

from d2plm.core.alphabet import CANONICAL_START, CANONICAL_STOP
from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key

# (tokens [T], cu_seqlens [S+1], max_seqlen, times [S]) → logits [T, V]
Denoiser = Callable[[Tensor, Tensor, int, Tensor], Tensor]

TIME_SAMPLINGS = ("uniform", "low_variance")
SMALLEST_ROOT = 1e-6  # of a corrupted fraction: fractions below its square are not drawn


@dataclass(frozen=True)
class Corrupted:
    """A corrupted batch and what is to be learnt from it.

    Attributes:
        tokens: uint8 [T], the noised tokens.
        targets: int64 [T], index of the clean residue among the twenty; 0 where the weight is 0.
        times: float64 [S], the paradigm's time of each segment, in [0, 1].
        weights: float32 [T], weight of each position's loss; 0 where it is no target.
        count: float64 scalar, this batch's share of the global batch's normaliser.
    """

    tokens: Tensor
    targets: Tensor
    times: Tensor
    weights: Tensor
    count: Tensor


@dataclass(frozen=True)
class BoundDraw:
    """One draw of the bound for each of S sequences, all float64 [S].

    Attributes:
        nats: the estimate of the NELBO; the mean over all draws is unbiased.
        fraction: the share of the residues that is masked; under the uniform source, where a
            replaced residue may come out the same, the probability of being replaced.
        cross_entropy: Σ −log p(clean residue) over the predicted residues, nats.
        predicted: how many these are.
    """

    nats: Tensor
    fraction: Tensor
    cross_entropy: Tensor
    predicted: Tensor


class Paradigm(ConfigMixin, ABC):
    """Everything that training, evaluation and sampling ask of a paradigm.

    Times are those of the paradigm's own paper, scaled to [0, 1].

    Attributes:
        name: in folders, experiments and messages.
        source: what corrupted residues show: `mask`, or `uniform`, a random residue.
        estimator: of the bound, as reports name it.
        prior_time: where nothing of the protein is left; `data_time`: where all of it is.
        samplers: those that are defined for it, its own first; `refused_samplers`: why not, for
            the others.
        default_steps, max_steps: of a sampler.
        time_sampling: `uniform` in the paradigm's time, or `low_variance`: with the corrupted
            fraction u drawn with density ½·u^(−½) and the loss weighted accordingly. The expected
            loss is the same. What a time adds to the bound has a variance *at that time* that grows
            towards the data, as 1/u for the mask and ln²u/u for the uniform source, and the
            variance among times is what stratified times take away; a density near the square root
            of the former keeps the rest small.
    """

    config_name = "paradigm_config.json"
    name: str
    source: str
    estimator: str
    prior_time: float
    data_time: float
    samplers: tuple[str, ...]
    refused_samplers: Mapping[str, str] = MappingProxyType({})
    default_steps: int
    max_steps: int
    time_sampling: str

    @abstractmethod
    def corrupt(self, batch: PackedBatch, key: Key) -> Corrupted:
        """Corrupt a batch at random times; every draw is keyed by `key` and `batch.draw_ids`."""

    @abstractmethod
    def loss(
        self, logits: Tensor, batch: PackedBatch, corrupted: Corrupted
    ) -> tuple[Tensor, Tensor]:
        """(weighted sum of the positions' losses [nats], its normaliser).

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
    ) -> BoundDraw:
        """One estimate of the NELBO of each sequence.

        The mean over `draw` = 0 … `draws` − 1 is unbiased; each draw is one stratum.

        Args:
            key: keys the draws; with `batch.draw_ids` = sequence ids they are the same for every
                model.
            control: −log of a unigram model's probabilities [20], float64, as a control variate:
                lower variance, the same expectation.
        """

    @abstractmethod
    def corrupted_fraction(self, times: Tensor) -> Tensor:
        """The probability that a residue is corrupted at `times`, same shape, float64."""

    @abstractmethod
    def corruption_rate(self, times: Tensor) -> Tensor:
        """The derivative of `corrupted_fraction` towards the prior, same shape, float64."""

    @abstractmethod
    def time_at_corrupted_fraction(self, fraction: Tensor) -> Tensor:
        """The time at which this fraction of the residues is expected to be corrupted, float64."""

    @abstractmethod
    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Logits [T, V] → log p(residue | the other positions) [T, 20].

        In fp32, or fp64 where the logits are.
        """

    def maskable(self, batch: PackedBatch) -> Tensor:
        """bool [T]: the residues that may be corrupted and predicted."""
        return batch.maskable()

    def kept(self, time: float) -> float:
        """The probability that a residue shows its clean value: ᾱ_t of diffusion, κ_t of a flow."""
        if time == self.data_time:
            return 1.0
        return 1 - float(self.corrupted_fraction(torch.tensor(time, dtype=torch.float64)))

    def times_of(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Uniform `draws` in [0, 1) [S] → (times, d corrupted fraction / d draw), float64 [S].

        So that the mean over draws of `f(times) · rate` is ∫ f du over the corrupted fraction u.
        """
        if self.time_sampling == "uniform":
            times = self.prior_time + (self.data_time - self.prior_time) * draws.double()
            return times, self.corruption_rate(times)
        root = (1 - draws.double()).clamp(min=SMALLEST_ROOT)
        return self.time_at_corrupted_fraction(root**2), 2 * root


def canonical_index(tokens: Tensor, where: Tensor) -> Tensor:
    """int64 [T]: index among the twenty canonical residues; 0 outside `where`."""
    return torch.where(where, tokens.long() - CANONICAL_START, 0)


def canonical_log_softmax(logits: Tensor) -> Tensor:
    """Logits [T, V] → log-probabilities of the twenty residues [T, 20], in fp32 or better."""
    canonical = logits[:, CANONICAL_START:CANONICAL_STOP]
    return canonical.to(torch.promote_types(canonical.dtype, torch.float32)).log_softmax(-1)
