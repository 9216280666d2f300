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
        cluster.wait_for_phase("my-job-worker-0", "Failed")

To look: `job(name, plural)`, `pods(job)`, `pod(name)`, `log(pod)`, `events(name)`,
`processes(pod)`, `requests`, `count(verb, resource)`; to wait: `wait_for(condition)`,
`wait_for_phase(pod, phase)`. Workers: `script(*scripts, worker=0)`; for their `envFrom`:
`configure("configmaps", name, data)`. Nodes: `full()`, `without_image()`, `slow(seconds)`,
`healthy()`, `lose_node(pod)`, `shut_down_node(pod, reason, message)`; `over_quota()`;
`kueue(**queues)`; `oom_kill(pod)`, `evict(pod)`, `preempt(pod)`, `delete_pod(pod)`;
`delete(plural, name, policy)`. API server:
`forbid(verb, resource)`, `fail_next(times, status)`, `cut_watches(after)`, `cut_logs(after)`,
`expire_watches()`, `stop_api()`, `start_api()`, `restart_api(seconds)`. Objects of custom resources
must pass their closed schemas where $D2PLM_CRD_DIR is set.

Not here: Master replicas, restart policies other than ExitCode and Never, TTLs, services and DNS,
and resource limits. What differs from the controllers' documentation says where it was seen.
"""

from tests.cluster.double import LAUNCHER_ROLE, NAMESPACE, Cluster, Request, Script

__all__ = ["LAUNCHER_ROLE", "NAMESPACE", "Cluster", "Request", "Script"]
