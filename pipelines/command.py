"""`d2plm pipeline run|compile|submit|cancel`: the same pipeline on a laptop and in a cluster."""

import os
import shlex
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from d2plm import __version__
from d2plm.cli import EXTERNAL
from d2plm.config import as_yaml, check_paths, flat, groups, plain
from d2plm.core.errors import ClusterError, ConfigError, did_you_mean, from_extra, require
from d2plm.core.terminal import JSON, done, output_modes, result, write_document
from d2plm.settings.commands import SETTINGS, PipelineSettings
from d2plm.settings.launcher import LABEL, QUANTITY
from d2plm.settings.registry import loaded_modules
from d2plm.settings.schema import Form, keys
from pipelines.steps import INPUTS, PARAMETERS, WORKSPACE
from pipelines.sweep import KINDS, composed

ACTIONS = {name: action.summary for name, action in EXTERNAL["pipeline"].actions.items()}
HELP = """usage: d2plm pipeline run|compile|submit [key=value ...]
       d2plm pipeline cancel RUN

Run the pipeline prepare → train → evaluate → register → generate on a laptop or in a cluster; with
sweep=…, the runs of another command in a cluster, parallel=N at a time.

{actions}

Example: d2plm pipeline run experiment=demo paradigm=flow_matching trainer.max_steps=500
         d2plm pipeline compile output=pipeline.yaml registry=registry.example/you
         KFP_HOST=https://kubeflow.example/pipeline d2plm pipeline submit experiment=demo wait=true

The settings are those of d2plm train --cfg. In a cluster, work_dir and data.input are paths on the
storage that the steps share, and these settings are also available:
  registry=PREFIX      registry of the images; default: D2PLM_REGISTRY
  tag=TAG              tag of the images; default: D2PLM_TAG, or {version}
  sweep=COMMAND        run all runs of d2plm scaling, compare or train (key=a,b), and make the table
  {parameters}
submit reads the variables KFP_HOST, KFP_TOKEN, KFP_NAMESPACE (multi-user servers), SSL_CERT_FILE:
  wait=true            follow the run; exit with 1 if it fails
  once=true            do not upload the definition as a version of the pipeline d2plm
  cron='0 0 3 * * 1'   recurring run: second minute hour day month weekday, in UTC
  service_account=NAME service account of the steps, which may create jobs; default: the server's"""

# Parameters of the pipeline that are not settings of the configuration.
CLUSTER = (
    *("prepare_cpu", "prepare_memory", "evaluate_cpu", "evaluate_memory", "evaluate_gpus"),
    *("claim", "tolerations", "node_selector", "trainer_image", "mmseqs2_image"),
)
YAML_EXAMPLES = {
    "tolerations": "[{key: nvidia.com/gpu, operator: Exists}]",
    "node_selector": "{disk: ssd}",
}
# Requests of experiments other than the examples, for which the pipeline's defaults are.
EXAMPLES = ("demo", "debug")
RESOURCES = {
    "prepare_cpu": "4",
    "prepare_memory": "16Gi",
    "evaluate_cpu": "2",
    "evaluate_memory": "8Gi",
}
NUMBERS = ("max_steps", "nodes", "gpus")
FORMS = {
    **dict.fromkeys(RESOURCES, QUANTITY),
    "evaluate_gpus": Form(r"\d+", "a number of GPUs"),
    "claim": LABEL,
}
IMAGES = ("registry", "tag")
OPTIONS = {
    "run": IMAGES,
    "compile": (*IMAGES, "sweep", "output"),
    "submit": (*IMAGES, "sweep", "wait", "cron", "once", "service_account"),
}


@dataclass(frozen=True)
class Request:
    """The parsed arguments of an action."""

    overrides: list[str]  # settings of the configuration
    cluster: dict[str, str]  # values of the parameters in `CLUSTER`, as written
    options: dict[str, str]  # options of the action


def demo(words: list[str]) -> int:
    """`d2plm demo`: run the whole pipeline on the bundled proteins, in `runs/demo`."""
    return main(["run", "experiment=demo", *words])


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help") or "--help" in words:
        actions = "\n".join(f"  {name:9}{what}" for name, what in ACTIONS.items())
        parameters = ", ".join(CLUSTER[:5]) + ",\n  " + ", ".join(CLUSTER[5:])
        print(HELP.format(actions=actions, version=__version__, parameters=parameters))
        return 0
    action, rest = words[0], words[1:]
    if action not in ACTIONS:
        raise ConfigError(
            f"unknown action {action!r}{did_you_mean(action, ACTIONS)}; see d2plm pipeline --help"
        )
    if action == "cancel":
        document = _cancel(rest)
    else:
        request = parse(action, rest)
        config, arguments = composed(request.options.get("sweep"), request.overrides)
        request = replace(request, overrides=arguments.overrides)
        if action == "run" and not arguments.show_only:
            check_paths("pipeline", config, INPUTS)
        trackers = config.tracking.trackers
        fits = "mlflow" in trackers or "sweep" in request.options  # which registers nothing
        require(fits, "tracking.trackers", trackers, "a list that includes mlflow")
        if arguments.show_only:
            result(as_yaml(config).rstrip())
            document = plain(config)
        else:
            if action != "run":
                with from_extra("Kubeflow Pipelines' SDK", "pipelines", ConfigError):
                    import_module("kfp.kubernetes")
            act = {"run": _run, "compile": _compile, "submit": _submit}[action]
            document = act(config, request)
    if JSON in output_modes():
        write_document(document)
    return 0


def parse(action: str, words: list[str]) -> Request:
    """Parse the words after an action; raises `ConfigError` for an unknown or malformed setting."""
    request, own = Request([], {}, {}), [*OPTIONS[action], *CLUSTER]
    settings = [name for kind in ("pipeline", *KINDS) for name in keys(SETTINGS[kind])]
    known = groups() | {name.partition(".")[0] for name in settings}
    for word in words:
        key, equals, value = word.partition("=")
        before = request.overrides[-1:]
        of_option = before == ["--module"] or (word == "job" and before == ["--cfg"])
        if equals and key in OPTIONS[action]:
            request.options[key] = value
        elif equals and key in CLUSTER:
            request.cluster[key] = value
        elif equals and (users := [name for name, options in OPTIONS.items() if key in options]):
            raise ConfigError(f"{key}: belongs to d2plm pipeline {' or '.join(users)}")
        elif equals and key.partition(".")[0] not in known and (near := did_you_mean(key, own)):
            raise ConfigError(f"unknown key {key!r}{near}; see d2plm pipeline --help")
        elif key in ("--cfg", "--module") or (equals and not word.startswith("-")) or of_option:
            request.overrides.append(word)
        else:
            near = did_you_mean(key.lstrip("-"), own)
            raise ConfigError(
                f"{word!r}{near}: d2plm pipeline takes settings as key=value; see d2plm pipeline "
                "--help"
            )
    return request


def cluster_arguments(config: PipelineSettings, request: Request) -> dict[str, Any]:
    """Build the pipeline's arguments for a run in a cluster; other parameters keep their defaults.

    Raises:
        ConfigError: if a parameter is invalid, or `work_dir` is not on the volume.
    """
    arguments = _parameters(config, request)
    if arguments["experiment"] not in EXAMPLES:
        arguments |= RESOURCES
    arguments |= {key: _read(key, value) for key, value in request.cluster.items()}
    given = [word.partition("=")[0] for word in request.overrides]
    work_dir, data_input = PurePosixPath(config.work_dir), config.data.input
    on_volume = f"{WORKSPACE}/{work_dir.name}"
    valid = work_dir.is_absolute() or "work_dir" not in given
    wanted = f"an absolute path on the volume, such as {on_volume}"
    require(valid, "work_dir", str(work_dir), wanted)
    require("[[" not in str(work_dir), "work_dir", str(work_dir), "without [[…]]: use %Y-%m-%d")
    arguments["work_dir"] = str(work_dir) if work_dir.is_absolute() else on_volume
    # A relative path of an experiment is in this repository and therefore in the images.
    if isinstance(data_input, str) and PurePosixPath(data_input).is_absolute():
        arguments["input"] = data_input
    return arguments


def _run(config: PipelineSettings, _: Request) -> dict[str, Any]:
    data_input = config.data.input
    require(bool(data_input), "data.input", data_input, "a FASTA file or a raw store")
    from pipelines.local import run_locally

    return run_locally(config)


def _compile(config: PipelineSettings, request: Request) -> dict[str, Any]:
    from pipelines.pipeline import define
    from pipelines.submit import compile_pipeline

    output = Path(request.options.get("output", "pipeline.yaml"))
    require(output.suffix in (".yaml", ".yml"), "output", str(output), "a .yaml file")
    pipeline = define(request.options.get("sweep"), getattr(config, "parallel", 0))
    compile_pipeline(output, pipeline, cluster_arguments(config, request))
    done(f"wrote {output}; upload it to Kubeflow Pipelines, or use d2plm pipeline submit")
    return {"output": output}


def _submit(config: PipelineSettings, request: Request) -> dict[str, Any]:
    wait, once = (request.options.get(key, "false") for key in ("wait", "once"))
    cron = request.options.get("cron")
    for key, value in (("wait", wait), ("once", once)):
        require(value in ("true", "false"), key, value, "true or false")
    require(wait == "false" or cron is None, "wait", wait, "false with cron, which never ends")
    from d2plm.launch.kfp_server import connect
    from pipelines.follow import follow
    from pipelines.pipeline import define
    from pipelines.submit import submit

    arguments = cluster_arguments(config, request)
    server = connect()
    run_id = submit(
        server,
        define(request.options.get("sweep"), getattr(config, "parallel", 0)),
        arguments,
        config.tracking.experiment,
        f"d2plm {config.name}",
        service_account=request.options.get("service_account"),
        cron=cron,
        once=once == "true",
    )
    url = server.run_url(run_id, recurring=cron is not None)
    result(url)
    if wait == "true":
        launcher = config.launcher
        follow(server, run_id, launcher.start_deadline_seconds, launcher.queue_deadline_seconds)
    return {"run" if cron is None else "recurring_run": run_id, "url": url}


def _cancel(words: list[str]) -> dict[str, Any]:
    run_id = words[0] if len(words) == 1 else ""
    require(bool(run_id), "RUN", " ".join(words), "the id of one run")
    from d2plm.launch.kfp_server import connect, reaching

    server = connect()
    try:
        with reaching(server.host):
            server.client.terminate_run(run_id)  # the train step then deletes its job
    except ClusterError as error:
        if getattr(error.__cause__, "status", None) != 404:
            raise
        raise ClusterError(
            f"no run {run_id} at {server.host}; its id is the last part of its address"
        ) from error
    done(f"cancelling: {server.run_url(run_id)}")
    return {"run": run_id, "url": server.run_url(run_id)}


def _parameters(config: PipelineSettings, request: Request) -> dict[str, Any]:
    """Convert settings to parameters of the pipeline; all others are collected in `overrides`.

    `overrides` also takes keys that may vary in a sweep, and numbers that are malformed or 0: the
    configuration rejects them, whereas a parameter of 0 stands for the configuration's value.
    """
    registry = request.options.get("registry", os.environ.get("D2PLM_REGISTRY", "")).rstrip("/")
    tag = request.options.get("tag") or os.environ.get("D2PLM_TAG") or __version__
    prefix = f"{registry}/" if registry else ""
    arguments: dict[str, Any] = {
        "experiment": "null",
        "trainer_image": f"{prefix}d2plm-trainer:{tag}",
        "mmseqs2_image": f"{prefix}d2plm-mmseqs2:{tag}",
    }
    parameters = {key: name for name, key in PARAMETERS.items() if name != "trainer_image"}
    rest = []
    for word in request.overrides:
        key, _, value = word.partition("=")
        name = parameters.get(key)
        may_vary = request.options.get("sweep") == "train" and "." in key
        is_unfit = name in NUMBERS and not (value.isdecimal() and int(value) > 0)
        if may_vary or is_unfit or value == "null":
            name = None
        if name in NUMBERS:
            arguments[name] = int(value)
        elif name is not None and "." in key:
            arguments[name] = str(flat(config)[key])
        elif name is not None:
            arguments[name] = value
        elif key != "work_dir":
            rest.append(word)
    return {**arguments, "overrides": shlex.join(rest), "modules": shlex.join(loaded_modules())}


def _read(key: str, value: str) -> Any:
    """Parse a parameter's value: lists and mappings are YAML, everything else is text."""
    if key not in YAML_EXAMPLES:
        if form := FORMS.get(key):
            require(form.fits(value), key, value, form.words)
        return value
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError:
        read = None
    example = YAML_EXAMPLES[key]
    valid = isinstance(read, type(yaml.safe_load(example)))
    require(valid, key, value, f"YAML such as {example}")
    return read
