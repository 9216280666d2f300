"""d2plm generate: generate sequences, or fill in templates, with a model or a family."""

from pathlib import Path
from typing import Any

from d2plm.assembly.generation import generate, generate_shard, output_name
from d2plm.core.errors import require
from d2plm.core.shards import Shard
from d2plm.settings.commands import GenerateSettings


def run(config: GenerateSettings) -> list[str] | dict[str, Any]:
    if config.generation.relatives is not None:
        require(config.shard is None, "shard", config.shard, "null with generation.relatives")
        from d2plm.assembly.new_members import generate_members  # imports HMMER

        return generate_members(config.generation, Path(config.output or "generated.fasta"))
    from d2plm.tracking.locations import open_model

    exported = open_model(config.model_dir, config.device, config.tracking_uri, key="model_dir")
    output = Path(config.output or output_name(exported.vocabulary))
    given = exported, config.generation, output, config.precision
    return (
        generate(*given) if config.shard is None else generate_shard(*given, Shard.of(config.shard))
    )
