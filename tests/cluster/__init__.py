"""A test double of a Kubernetes cluster with Kubeflow's training operators, in this process.

It serves the API over real HTTP on 127.0.0.1, for the official client with the kube config that it
writes, and runs pods as local processes: a PyTorchJob's or TrainJob's workers as real torchrun with
the PET_* variables that its operator sets, and the pods of an Indexed Job (batch/v1). It is no
cluster: what it accepts, a real one has yet to accept. Objects live in the namespace `d2plm`; the
client has the rights of the Role `d2plm-launcher` and no others.

    with Cluster(tmp_path, mounts={"/workspace": tmp_path / "workspace"}) as cluster:
        api = kubernetes.config.new_client_from_config(str(cluster.kube_config))
        cluster.script(Script(lines=("step 1",), exit_code=3), worker=0)  # not the real command
        ...                                                               # create a job
        cluster.wait_for(lambda: cluster.log("my-job-worker-0"))

Objects of custom resources must pass their closed schemas where $D2PLM_CRD_DIR is set. Not here:
Master replicas, restart policies other than ExitCode and Never, TTLs, operators' deadlines, pods
that outlive their job, services and DNS, and resource limits. What differs from the controllers'
documentation says where it was seen.
"""

from tests.cluster.double import NAMESPACE, Cluster, Script

__all__ = ["NAMESPACE", "Cluster", "Script"]
