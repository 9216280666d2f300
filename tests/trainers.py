"""Trainers for tests, from the settings of all sections by name."""

from dataclasses import fields
from typing import Any

from d2plm.settings.data import LoaderSettings
from d2plm.settings.training import TrainerSettings
from d2plm.training.trainer import Trainer

SMALL = {"token_budget": 8192}


def make_trainer(kind: type[Trainer] = Trainer, /, **named: Any) -> Trainer:
    """A trainer; fields of `TrainerSettings` and `LoaderSettings` are given by name."""

    def taken(settings: type[Any]) -> dict[str, Any]:
        return {one.name: named.pop(one.name) for one in fields(settings) if one.name in named}

    settings = TrainerSettings(**taken(TrainerSettings))
    return kind(settings, loading=LoaderSettings(**{**SMALL, **taken(LoaderSettings)}), **named)
