"""Train on a cluster by the Kubeflow SDK: start a TrainJob, wait for its end, print its log.

    kubectl apply -f k8s/clustertrainingruntime.yaml   # once, by an administrator
    pip install 'kubeflow==0.5.*'
    python examples/kubeflow_sdk.py --namespace d2plm \
        --image registry.example/you/d2plm-trainer:0.1.0 experiment=cluster trainer.max_steps=1000

The command is the runtime's; its settings are those of `d2plm train`, in an environment variable.
Results are on the volume of the claim d2plm-workspace.
"""

import argparse
import shlex

from kubeflow.common.types import KubernetesBackendConfig
from kubeflow.trainer import CustomTrainerContainer, TrainerClient


def main() -> None:
    parser = argparse.ArgumentParser(description="D2PLM by the Kubeflow SDK.")
    parser.add_argument("settings", nargs="*", default=["experiment=cluster"], help="key=value")
    parser.add_argument("--image", default="d2plm-trainer:0.1.0")
    parser.add_argument("--namespace", help="default: kubectl's current one")
    parser.add_argument("--nodes", type=int, default=1, help="several need a ReadWriteMany volume")
    parser.add_argument("--cpu", type=int, default=2, help="of a node, a process each without GPUs")
    parser.add_argument("--gpu", type=int, default=0, help="of a node, a process each")
    parser.add_argument("--memory", default="4Gi", help="of a node")
    parser.add_argument("--hours", type=float, default=24.0, help="to wait for the end")
    arguments = parser.parse_args()

    resources = {"cpu": arguments.cpu, "memory": arguments.memory}
    if arguments.gpu:
        resources["gpu"] = arguments.gpu
    client = TrainerClient(KubernetesBackendConfig(namespace=arguments.namespace))
    name = client.train(
        runtime="d2plm",
        trainer=CustomTrainerContainer(
            image=arguments.image,
            num_nodes=arguments.nodes,
            resources_per_node=resources,
            env={"D2PLM_SETTINGS": shlex.join(arguments.settings)},
        ),
    )
    print(f"created TrainJob {name}", flush=True)
    try:
        client.wait_for_job_status(name, timeout=int(arguments.hours * 3600))
    except RuntimeError as error:  # the job has failed
        raise SystemExit(str(error)) from error
    finally:
        for line in client.get_job_logs(name):
            print(line)


if __name__ == "__main__":
    main()
