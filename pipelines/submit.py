"""Submitting the pipeline to a Kubeflow Pipelines server."""

import os
from typing import Any

from d2plm.errors import ClusterError, first_line
from pipelines.pipeline import pipeline


def submit(arguments: dict[str, Any], experiment: str) -> str:
    """Create a run of the pipeline on the server at `KFP_HOST` and give its address.

    Raises:
        ClusterError: without `KFP_HOST`, or when the server cannot be reached or refuses.
    """
    host = os.environ.get("KFP_HOST")
    if not host:
        raise ClusterError(
            "KFP_HOST is not set: give the address of your Kubeflow Pipelines server"
        )
    from kfp import Client

    try:
        client = Client(host=host, existing_token=os.environ.get("KFP_TOKEN"))
        run = client.create_run_from_pipeline_func(
            pipeline, arguments=arguments, experiment_name=experiment
        )
    except Exception as error:  # the client raises whatever its transports raise
        raise ClusterError(
            f"Kubeflow Pipelines at {host}: {first_line(error)}; check KFP_HOST, KFP_TOKEN and the "
            "network"
        ) from error
    return f"{host.rstrip('/')}/#/runs/details/{run.run_id}"
