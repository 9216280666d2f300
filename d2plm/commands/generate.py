"""d2plm generate: generate sequences, or fill in templates, with an exported model."""

from pathlib import Path

from d2plm.assembly.generation import generate, output_name
from d2plm.settings.commands import GenerateSettings
from d2plm.tracking.locations import open_model


def run(config: GenerateSettings) -> list[str]:
    exported = open_model(config.model_dir, config.device, config.tracking_uri, key="model_dir")
    output = Path(config.output or output_name(exported.vocabulary))
    return generate(exported, config.generation, output, config.precision)
