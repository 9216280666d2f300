"""`d2plm pipeline run|compile|submit`: the same settings, three ways to use the one definition."""

import shlex
from pathlib import Path
from typing import Any

from d2plm.config import Config, compose_arguments
from d2plm.errors import ConfigError, did_you_mean, require

ACTIONS = {
    "run": "run every step on this machine",
    "compile": "write the pipeline's YAML (output=pipeline.yaml)",
    "submit": "submit it to the Kubeflow Pipelines server at KFP_HOST",
}
HELP = """usage: d2plm pipeline run|compile|submit [key=value ...]

prepare → train → evaluate → register → generate, one definition for a laptop and a cluster.

{actions}

Example: d2plm pipeline run experiment=demo paradigm=flow_matching trainer.max_steps=500
         d2plm pipeline compile output=pipeline.yaml

Settings are those of d2plm train --cfg. On a cluster, work_dir and data.input are paths on the
storage that the steps share."""
PARAMETERS = ("paradigm", "experiment", "work_dir", "data.input")


def main(words: list[str]) -> int:
    """Run the action that `words` name; gives the exit code."""
    if not words or words[0] in ("-h", "--help") or "--help" in words:
        print(HELP.format(actions="\n".join(f"  {k:9}{v}" for k, v in ACTIONS.items())))
        return 0
    action, rest = words[0], words[1:]
    if action not in ACTIONS:
        raise ConfigError(
            f"unknown action {action!r}{did_you_mean(action, ACTIONS)}; see d2plm pipeline --help"
        )
    output = Path("pipeline.yaml")
    overrides: list[str] = []
    for word in rest:
        key, equals, value = word.partition("=")
        of_cfg = word == "job" and overrides[-1:] == ["--cfg"]
        if action == "compile" and key == "output":
            output = Path(value)
        elif key == "--cfg" or (equals and not word.startswith("-")) or of_cfg:
            overrides.append(word)
        else:
            raise ConfigError(
                f"{word!r}: d2plm pipeline takes settings as key=value, which every step composes "
                "anew; see d2plm pipeline --help"
            )
    config, show_only = compose_arguments("pipeline", overrides)
    if show_only:
        print(config.as_yaml(), end="")
        return 0
    data_input = config["data"]["input"]
    require(bool(data_input), "data.input", data_input, "a FASTA file or a raw store")
    arguments = pipeline_arguments(config, overrides)
    if action == "run":
        from pipelines.run import run_locally

        run_locally(config, arguments)
    elif action == "compile":
        from pipelines.compile import compile_pipeline

        compile_pipeline(output, arguments)
        print(f"wrote {output}; upload it to Kubeflow Pipelines, or: d2plm pipeline submit")
    else:
        from pipelines.submit import submit

        print(submit(arguments, config["tracking"]["experiment"]))
    return 0


def pipeline_arguments(config: Config, overrides: list[str]) -> dict[str, Any]:
    """The pipeline's parameters: those it names, and the rest of the overrides as one line."""
    given = dict(word.split("=", 1) for word in overrides)
    rest = [f"{key}={value}" for key, value in given.items() if key not in PARAMETERS]
    return {
        "paradigm": given.get("paradigm", "diffusion"),
        "experiment": given.get("experiment", "null"),
        "work_dir": config["work_dir"],
        "input": config["data"]["input"],
        "overrides": shlex.join(rest),
    }
