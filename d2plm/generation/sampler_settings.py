"""Sampling settings, checked against the model's paradigm; settings without effect are rejected."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from d2plm.core.errors import ConfigError, require, require_number
from d2plm.paradigms.paradigm import Paradigm
from d2plm.settings.evaluation import SamplerSettings

# The authors' values for unconditional generation (github.com/kuleshov-group/remdm, scripts).
REMDM_ETA = {"cap": 0.008, "rescale": 0.015}
ONLY_OF = {
    "corrector": "euler",
    "remask": "confidence",
    "remdm_schedule": "remdm",
    "remdm_eta": "remdm",
}


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplerSettings):
    """How to sample: `SamplerSettings` with the defaults of a paradigm."""

    @classmethod
    def of(cls, settings: SamplerSettings | Mapping[str, Any]) -> Self:
        """From a section of settings, ignoring those that are not about sampling."""
        values = settings if isinstance(settings, Mapping) else vars(settings)
        return cls(**{one.name: values[one.name] for one in fields(cls) if one.name in values})

    def resolved(self, paradigm: Paradigm) -> "Sampling":
        """A copy with the paradigm's defaults.

        Raises:
            ConfigError: if the paradigm does not define the sampler, or the sampler does not have a
                setting.
        """
        sampler: str = paradigm.samplers[0] if self.sampler is None else self.sampler
        if sampler not in paradigm.samplers:
            reason = paradigm.refused_samplers.get(sampler, "it has no such step")
            raise ConfigError(
                f"is not defined for {paradigm.name}, the paradigm of this model: {reason}; use "
                f"{' or '.join(paradigm.samplers)}",
                {"sampler": sampler},
            )
        for field in fields(self):
            owner, value = ONLY_OF.get(field.name, sampler), getattr(self, field.name)
            wanted = f"{field.default!r} with sampler={sampler!r}: only {owner!r} has it"
            require(owner == sampler or value == field.default, field.name, value, wanted)
        eta = REMDM_ETA[self.remdm_schedule] if self.remdm_eta is None else self.remdm_eta
        return replace(
            self,
            sampler=sampler,  # type: ignore[arg-type]  # one of the paradigm's
            steps=self._steps(sampler, paradigm),
            temperature=1.0 if self.temperature is None else self.temperature,
            remdm_eta=eta if sampler == "remdm" else None,
        )

    def applied(self) -> dict[str, object]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.sampler == "first_hitting":
            del values["steps"]
        return {
            name: value
            for name, value in values.items()
            if ONLY_OF.get(name, self.sampler) == self.sampler
        }

    def described(self, paradigm: Paradigm, dtype: torch.dtype) -> dict[str, Any]:
        """All settings that affect a sequence, as JSON; `dtype` of the matrix products."""
        name = str(dtype).removeprefix("torch.")
        return {"paradigm": paradigm.name, **self.applied(), "dtype": name}

    def _steps(self, sampler: str, paradigm: Paradigm) -> int | None:
        if sampler == "first_hitting":
            wanted = "null with sampler='first_hitting', which fills in one residue at a time"
            require(self.steps is None, "steps", self.steps, wanted)
            return None
        steps = paradigm.default_steps if self.steps is None else self.steps
        require_number("steps", steps, integer=True, low=1, high=paradigm.max_steps)
        return steps


def in_a_line(settings: Mapping[str, Any]) -> str:
    """Settings formatted for the header of a generated protein."""
    return " ".join(f"{name}={value}" for name, value in settings.items())
