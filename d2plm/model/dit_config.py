"""DiTConfig: the architecture of a DiT, as saved in the `config.json` of every exported model."""

from dataclasses import asdict, fields
from typing import Any

from transformers import PretrainedConfig

from d2plm.core.vocabulary import EOS, PAD
from d2plm.settings.model import ModelSettings

SETTINGS = tuple(field.name for field in fields(ModelSettings))


class DiTConfig(PretrainedConfig):
    """Sizes and rates of a `DiT`: transformers' view of `ModelSettings`.

    Takes the fields of `ModelSettings` and `PretrainedConfig`; `ConfigError` for impossible values.
    """

    model_type = "d2plm_dit"

    def __init__(self, **settings: Any) -> None:
        own = {name: settings.pop(name) for name in SETTINGS if name in settings}
        values = asdict(ModelSettings(**own))
        if values["num_experts"] is not None:
            values["experts_per_token"] = values["experts_per_token"] or 2
            if values["balance_rate"] is None:
                values["balance_rate"] = 0.01
        if values["rope_frequencies"] is not None:
            values["rope_frequencies"] = list(values["rope_frequencies"])
        for name, value in values.items():
            setattr(self, name, value)
        super().__init__(**{"pad_token_id": PAD, "eos_token_id": EOS, **settings})

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SETTINGS}
