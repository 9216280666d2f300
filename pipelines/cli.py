"""`d2plm pipeline run|compile|submit|cancel`: one definition, the same settings everywhere."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from d2plm import __version__
from d2plm.cli import EXTERNAL
from d2plm.config import Config, compose_arguments
from d2plm.core.errors import ConfigError, did_you_mean, require
from d2plm.core.terminal import JSON, done, output_modes, result, write_document

ACTIONS = {name: action.summary for name, action in EXTERNAL["pipeline"].actions.items()}
HELP = """usage: d2plm pipeline run|compile|submit [key=value ...]
       d2plm pipeline cancel RUN

prepare → train → evaluate → register → generate, one definition for a laptop and a cluster.

{actions}

Example: d2plm pipeline run experiment=demo paradigm=flow_matching trainer.max_steps=500
         d2plm pipeline compile output=pipeline.yaml registry=registry.example/you
         KFP_HOST=https://kubeflow.example/pipeline d2plm pipeline submit experiment=demo wait=true

Settings are those of d2plm train --cfg. On a cluster, work_dir and data.input are paths on the
storage that the steps share. There, these are settings too:
  registry=PREFIX      of the images; else D2PLM_REGISTRY
  tag=TAG              of the images; else D2PLM_TAG, or {version}
  {parameters}
For submit: KFP_HOST, KFP_TOKEN, KFP_NAMESPACE (yours, where there are several), SSL_CERT_FILE.
  wait=true            follow the run; exit with 1 if it fails
  cron='0 0 3 * * 1'   again and again: second minute hour day month weekday, in UTC
  service_account=NAME that the steps run as, which may create jobs; else the server's own"""

# Settings that are parameters of the pipeline, which KFP's form shows by these names.
GROUPS = {"paradigm": "paradigm", "experiment": "experiment", "model": "model"}
GROUPS |= {"trainer": "trainer", "launcher": "launcher"}
KEYS = {
    "tracking.registered_model": "registered_model",
    "launcher.cpu": "node_cpu",
    "launcher.memory": "node_memory",
    "launcher.gpu_resource": "gpu_resource",
}
NUMBERS = {"trainer.max_steps": "max_steps", "launcher.nodes": "nodes", "launcher.gpus": "gpus"}
# Parameters that are no settings of the configuration: a cluster's alone.
CLUSTER = (
    *("prepare_cpu", "prepare_memory", "evaluate_cpu", "evaluate_memory", "evaluate_gpus"),
    *("claim", "tolerations", "node_selector", "trainer_image", "mmseqs2_image"),
)
IMAGES = ("registry", "tag")
OPTIONS = {
    "run": IMAGES,
    "compile": (*IMAGES, "output"),
    "submit": (*IMAGES, "wait", "cron", "service_account"),
}


@dataclass(frozen=True)
class Request:
    """What the words of a command line ask for.

    Attributes:
        overrides: settings of the configuration.
        cluster: parameters of the pipeline that are none, as they were written.
        options: of the action.
    """

    overrides: list[str]
    cluster: dict[str, str]
    options: dict[str, str]


def main(words: list[str]) -> int:
    """Run the action that `words` name; gives the exit code."""
    if not words or words[0] in ("-h", "--help") or "--help" in words:
        print(_help())
        return 0
    action, rest = words[0], words[1:]
    if action not in ACTIONS:
        raise ConfigError(
            f"unknown action {action!r}{did_you_mean(action, ACTIONS)}; see d2plm pipeline --help"
        )
    document = _cancel(rest) if action == "cancel" else _act(action, parse(action, rest))
    if JSON in output_modes():
        write_document(document)
    return 0


def _act(action: str, request: Request) -> dict[str, Any]:
    config, show_only = compose_arguments("pipeline", request.overrides)
    if show_only:
        result(config.as_yaml().rstrip())
        return config.values
    return {"run": _run, "compile": _compile, "submit": _submit}[action](config, request)


def parse(action: str, words: list[str]) -> Request:
    """Take the words after an action apart.

    Raises:
        ConfigError: for what is no setting.
    """
    request = Request([], {}, {})
    for word in words:
        key, equals, value = word.partition("=")
        of_cfg = word == "job" and request.overrides[-1:] == ["--cfg"]
        if equals and key in OPTIONS[action]:
            request.options[key] = value
        elif equals and key in CLUSTER:
            request.cluster[key] = value
        elif key == "--cfg" or (equals and not word.startswith("-")) or of_cfg:
            request.overrides.append(word)
        else:
            near = did_you_mean(key.lstrip("-"), [*OPTIONS[action], *CLUSTER])
            raise ConfigError(
                f"{word!r}{near}: d2plm pipeline takes settings as key=value, which every step "
                "composes anew; see d2plm pipeline --help"
            )
    return request


def local_arguments(config: Config, request: Request) -> dict[str, Any]:
    """The pipeline's arguments for a run on this machine."""
    places = {"work_dir": config["work_dir"], "input": config["data"]["input"]}
    return {**_lifted(config, request.overrides), **_images(request.options), **places}


def cluster_arguments(config: Config, request: Request) -> dict[str, Any]:
    """The pipeline's arguments for a run in a cluster; those not said are left to its defaults.

    Raises:
        ConfigError: if a parameter cannot be read, or `work_dir` is no place on the volume.
    """
    from pipelines.pods import WORKSPACE

    arguments = {**_lifted(config, request.overrides), **_images(request.options)}
    arguments |= {key: _read(key, value) for key, value in request.cluster.items()}
    given = [word.partition("=")[0] for word in request.overrides]
    work_dir, data_input = config["work_dir"], config["data"]["input"]
    if not PurePosixPath(work_dir).is_absolute():
        wanted = (
            f"an absolute path on the volume, such as {WORKSPACE}/{PurePosixPath(work_dir).name}"
        )
        require("work_dir" not in given, "work_dir", work_dir, wanted)
        work_dir = f"{WORKSPACE}/{PurePosixPath(work_dir).name}"
    arguments["work_dir"] = work_dir
    # An experiment's own relative path is one of this repository: its proteins are in the images.
    if "data.input" in given or (data_input and PurePosixPath(data_input).is_absolute()):
        arguments["input"] = data_input
    return arguments


def _run(config: Config, request: Request) -> dict[str, Any]:
    data_input = config["data"]["input"]
    require(bool(data_input), "data.input", data_input, "a FASTA file or a raw store")
    from pipelines.run import run_locally

    return run_locally(config, local_arguments(config, request))


def _compile(config: Config, request: Request) -> dict[str, Any]:
    from pipelines.compile import compile_pipeline

    output = Path(request.options.get("output", "pipeline.yaml"))
    compile_pipeline(output, cluster_arguments(config, request))
    done(f"wrote {output}; upload it to Kubeflow Pipelines, or: d2plm pipeline submit")
    return {"output": output}


def _submit(config: Config, request: Request) -> dict[str, Any]:
    wait, cron = _flag("wait", request.options.get("wait", "")), request.options.get("cron")
    require(not (wait and cron), "wait", wait, "false with cron: a schedule does not end")
    from pipelines.follow import follow
    from pipelines.server import connect
    from pipelines.submit import schedule, submit

    arguments = cluster_arguments(config, request)
    server = connect()
    experiment, name = config["tracking"]["experiment"], f"d2plm {config['name']}"
    account = request.options.get("service_account")
    if cron:
        recurring = schedule(server, arguments, experiment, name, cron, account)
        result(server.recurring_run_url(recurring))
        return {"recurring_run": recurring, "url": server.recurring_run_url(recurring)}
    run_id = submit(server, arguments, experiment, name, account)
    result(server.run_url(run_id))
    if wait:
        follow(server, run_id, done)
    return {"run": run_id, "url": server.run_url(run_id)}


def _cancel(words: list[str]) -> dict[str, Any]:
    run_id = words[0] if len(words) == 1 else ""
    require(bool(run_id), "d2plm pipeline cancel", " ".join(words), "given the id of one run")
    from pipelines.server import connect
    from pipelines.submit import cancel

    server = connect()
    cancel(server, run_id)
    done(f"asked to end: {server.run_url(run_id)}")
    return {"run": run_id, "url": server.run_url(run_id)}


def _lifted(config: Config, overrides: list[str]) -> dict[str, Any]:
    """Settings that are parameters, as such, and the rest in one line.

    A number that is none stays in the line, where the configuration refuses it; so does a 0, which
    as a parameter means that nothing is said.
    """
    arguments: dict[str, Any] = {"experiment": "null"}
    rest = []
    for word in overrides:
        key, _, value = word.partition("=")
        if key in GROUPS:
            arguments[GROUPS[key]] = value
        elif key in KEYS:
            section, _, name = key.partition(".")
            arguments[KEYS[key]] = str(config[section][name])
        elif key in NUMBERS and value.isdecimal() and int(value) > 0:
            arguments[NUMBERS[key]] = int(value)
        elif key not in ("work_dir", "data.input"):
            rest.append(word)
    return {**arguments, "overrides": shlex.join(rest)}


def _images(options: dict[str, str]) -> dict[str, str]:
    registry = options.get("registry", os.environ.get("D2PLM_REGISTRY", "")).rstrip("/")
    tag = options.get("tag") or os.environ.get("D2PLM_TAG") or __version__
    prefix = f"{registry}/" if registry else ""
    names = {"trainer_image": "d2plm-trainer", "mmseqs2_image": "d2plm-mmseqs2"}
    return {parameter: f"{prefix}{name}:{tag}" for parameter, name in names.items()}


def _read(key: str, value: str) -> Any:
    """A parameter's value: lists and mappings are YAML, everything else is text."""
    kind = {"tolerations": list, "node_selector": dict}.get(key)
    if kind is None:
        return value
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError:
        read = None
    wanted = {list: "[{key: nvidia.com/gpu, operator: Exists}]", dict: "{disk: ssd}"}[kind]
    require(isinstance(read, kind), key, value, f"YAML such as {wanted}")
    return read


def _flag(key: str, value: str) -> bool:
    require(value in ("", "true", "false"), key, value, "true or false")
    return value == "true"


def _help() -> str:
    return HELP.format(
        actions="\n".join(f"  {name:9}{what}" for name, what in ACTIONS.items()),
        version=__version__,
        parameters=", ".join(CLUSTER[:5]) + ",\n  " + ", ".join(CLUSTER[5:]),
    )
