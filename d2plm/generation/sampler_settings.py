"""Sampling: the sampler and its settings, checked against the model's paradigm before sampling.

A setting that the chosen sampler would ignore is rejected.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from d2plm.core.errors import ConfigError, require, require_choice, require_number
from d2plm.paradigms.paradigm import Paradigm

SAMPLERS = ("ancestral", "euler", "first_hitting", "confidence", "remdm")
# The authors' values for unconditional generation (github.com/kuleshov-group/remdm, scripts).
REMDM_ETA = {"cap": 0.008, "rescale": 0.015}
ONLY_OF = {
    "corrector": "euler",
    "remask": "confidence",
    "remdm_schedule": "remdm",
    "remdm_eta": "remdm",
}


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Args:
        sampler: one of `SAMPLERS`, see `samplers`; None selects the paradigm's default.
        steps: number of steps, each at most one model evaluation; None selects the paradigm's
            default. `first_hitting` takes one step per residue. `confidence` takes at most as
            many steps as there are residues to design.
        temperature: divides the logits; below 1 is more conservative.
        top_k: keep only the k most likely residues; None keeps all.
        top_p: keep the most likely residues that together reach this probability.
        corrector: peak strength of `euler`'s corrector, which corrupts residues again and lets the
            model reconsider them; 0 is plain Euler.
        remask: whether the residues that `confidence` has filled in compete again at each step.
        remdm_schedule: of the probability with which `remdm` masks a residue again: `cap` is η at
            most, `rescale` is η times the largest possible.
        remdm_eta: η; None is 0.008 for `cap` and 0.015 for `rescale`.
        seed: of every draw.
    """

    sampler: str | None = None
    steps: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    corrector: float = 0.0
    remask: bool = False
    remdm_schedule: str = "cap"
    remdm_eta: float | None = None
    seed: int = 0

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Self:
        """The settings among the entries of a mapping, which may have others."""
        return cls(**{field.name: section[field.name] for field in fields(cls)})

    def resolved(self, paradigm: Paradigm) -> "Sampling":
        """A copy with the paradigm's defaults.

        Raises:
            ConfigError: on a value out of range, a sampler that the paradigm does not define, or a
                setting that the sampler does not have.
        """
        sampler = paradigm.samplers[0] if self.sampler is None else self.sampler
        require_choice("sampler", sampler, SAMPLERS)
        if sampler not in paradigm.samplers:
            reason = paradigm.refused_samplers.get(sampler, "it has no such step")
            raise ConfigError(
                f"sampler={sampler!r}: is not defined for {paradigm.name}, the paradigm of this "
                f"model: {reason}; use {' or '.join(paradigm.samplers)}"
            )
        self._require_ranges()
        for field in fields(self):
            owner, value = ONLY_OF.get(field.name, sampler), getattr(self, field.name)
            wanted = f"{field.default!r} with sampler={sampler!r}: only {owner!r} has it"
            require(owner == sampler or value == field.default, field.name, value, wanted)
        eta = REMDM_ETA[self.remdm_schedule] if self.remdm_eta is None else self.remdm_eta
        return replace(
            self,
            sampler=sampler,
            steps=self._steps(sampler, paradigm),
            remdm_eta=eta if sampler == "remdm" else None,
        )

    def applied(self) -> dict[str, object]:
        """The chosen sampler's settings by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.sampler == "first_hitting":
            del values["steps"]
        return {
            name: value
            for name, value in values.items()
            if ONLY_OF.get(name, self.sampler) == self.sampler
        }

    def described(self, paradigm: Paradigm, dtype: torch.dtype) -> dict[str, Any]:
        """Every setting on which a sequence depends, as JSON; `dtype` of the matrix work."""
        name = str(dtype).removeprefix("torch.")
        return {"paradigm": paradigm.name, **self.applied(), "dtype": name}

    def note(self, paradigm: Paradigm, dtype: torch.dtype) -> str:
        """`described` in a line."""
        return in_a_line(self.described(paradigm, dtype))

    def _steps(self, sampler: str, paradigm: Paradigm) -> int | None:
        if sampler == "first_hitting":
            wanted = "null with sampler='first_hitting', which fills in one residue at a time"
            require(self.steps is None, "steps", self.steps, wanted)
            return None
        steps = paradigm.default_steps if self.steps is None else self.steps
        require_number("steps", steps, integer=True, low=1, high=paradigm.max_steps)
        return steps

    def _require_ranges(self) -> None:
        require_number("temperature", self.temperature, low=0, low_open=True)
        require_number("top_k", self.top_k, optional=True, integer=True, low=1)
        require_number("top_p", self.top_p, low=0, low_open=True, high=1)
        require_number("corrector", self.corrector, low=0, high=math.inf, high_open=True)
        require(isinstance(self.remask, bool), "remask", self.remask, "true or false")
        require_choice("remdm_schedule", self.remdm_schedule, tuple(REMDM_ETA))
        require_number("remdm_eta", self.remdm_eta, optional=True, low=0, high=1)
        require_number("seed", self.seed, integer=True, low=0)


def in_a_line(settings: Mapping[str, Any]) -> str:
    """Settings as in the header of a generated protein."""
    return " ".join(f"{name}={value}" for name, value in settings.items())
