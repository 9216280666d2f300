"""Settings of the paradigms; they are saved with every model."""

from dataclasses import dataclass
from typing import Literal

from d2plm.core.errors import require
from d2plm.settings.schema import Settings, key

TimeSampling = Literal["uniform", "low_variance"]
MAX_MONOTONE_SLOPE = 3.0  # both end slopes at most 3 keep the cubic schedule increasing


@dataclass(frozen=True, kw_only=True)
class ParadigmSettings(Settings):
    """Settings of every paradigm."""

    type: str = key("")
    """registered name of the paradigm"""
    name: str = key("", composed="${.type}")
    """name in output_dir, tracking experiment and registered model"""


@dataclass(frozen=True, kw_only=True)
class DiffusionSettings(ParadigmSettings):
    """Absorbing discrete diffusion (D3PM, arXiv:2107.03006)."""

    type: str = key("diffusion")
    num_train_timesteps: int | None = key(1000, low=1)
    """number T of noise steps; null: continuous time"""
    schedule: Literal["linear", "cosine", "linear_beta"] = key("linear")
    """schedule of the fraction of visible tokens"""
    beta_start: float = key(1e-4, above=0, below=1)
    """first β of linear_beta"""
    beta_end: float = key(0.02, above=0, below=1)
    """last β of linear_beta"""
    loss: Literal["elbo", "mean"] = key("elbo")
    """elbo: weighted as the bound; mean: all masked tokens equally"""
    time_sampling: TimeSampling = key("uniform")
    """distribution of training times; low_variance: steadier loss, same expectation"""
    shift: bool = key(False)
    """predict token i from position i - 1, as left-to-right models do"""
    prediction_type: Literal["residue"] = key("residue")
    """prediction; discrete states have no noise to predict"""

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = f"a number ≥ beta_start={self.beta_start}"
        require(self.beta_end >= self.beta_start, "beta_end", self.beta_end, wanted)


@dataclass(frozen=True, kw_only=True)
class FlowMatchingSettings(ParadigmSettings):
    """Discrete flow matching (arXiv:2407.15595)."""

    type: str = key("flow_matching")
    source: Literal["mask", "uniform"] = key("mask")
    """replacement of corrupted tokens: the mask, or random tokens"""
    schedule: Literal["linear", "polynomial", "cosine", "cubic"] = key("cosine")
    """schedule of the fraction of clean tokens"""
    polynomial_degree: float = key(2.0, above=0)
    """exponent of the polynomial schedule"""
    cubic_start_slope: float = key(0.0, low=0, high=MAX_MONOTONE_SLOPE)
    """slope of the cubic schedule at the source"""
    cubic_end_slope: float = key(0.0, low=0, high=MAX_MONOTONE_SLOPE)
    """slope of the cubic schedule at the data"""
    loss: Literal["elbo", "mean", "generalised_kl"] = key("elbo")
    """training loss; generalised_kl needs the uniform source"""
    time_sampling: TimeSampling = key("uniform")
    """distribution of training times; low_variance: steadier loss, same expectation"""
    num_flow_steps: int = key(50, low=1)
    """steps of the sampler if generation.steps is null"""
