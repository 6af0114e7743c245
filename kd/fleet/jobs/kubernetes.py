"""Kubernetes: a TrainJob of Kubeflow's Trainer 2, sent with ``kubectl``."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from kd.errors import UserError
from kd.fleet.jobs.job import Job, Machines
from kd.fleet.jobs.target import ANSWER_S, Outcome, Target, ask, followed, need, patiently
from kd.storage.elsewhere import json_of, text_of
from kd.storage.writing import remove

POLL_S = 10
"""Seconds between two questions for the job's state."""
RUNS, FILES = "/kd-runs", "/kd-files"
"""Folders in every container: the claim, and the user's own recipe and overlays."""


class Kubernetes(Target):
    """A TrainJob; a data tier is a Job beside it."""

    example = "2xgpu:8"
    keys: Mapping[str, str] = {
        "claim": "PersistentVolumeClaim for runs and data, at /kd-runs in every container; shared by all machines",
        "namespace": "of the job (default)",
        "runtime": "ClusterTrainingRuntime (torch-distributed)",
    }

    def write(self, job: Job) -> dict[str, str]:
        """``trainjob.yaml``, as text by its name: the documents that ``kubectl`` applies.

        The TrainJob; a ConfigMap where the user has own files; a Secret and a Job where machines prepare data.

        Raises:
            UserError: ``spot``, a channel, or machines that are not counted as ``gpu:N`` or ``cpu:N``.
        """
        if job.spot:
            raise UserError(
                "spot: a cluster's own node pools decide it; spot=true is for sagemaker and sky"
            )
        if job.channels:
            raise UserError(
                f"channel:{job.channels[0]}: give the folder below {RUNS} in the claim itself"
            )
        documents: list[dict[str, object]] = [_train_job(job)]
        if job.files:
            content = {name: text_of(path) for name, path in job.files.items()}
            documents.insert(0, _document("ConfigMap", job, {"data": content}))
        if job.data_machines:
            secret = _document("Secret", job, {"stringData": {"token": job.secret}})
            documents = [secret, *documents, _data_job(job, job.data_machines)]
        return {"trainjob.yaml": yaml.safe_dump_all(documents, sort_keys=False, width=1000)}

    def check(self, job: Job) -> None:
        """Has the cluster validate the documents (``kubectl apply --dry-run=server``)."""
        need("kubectl", "kubernetes.io/docs/tasks/tools")
        ask(["kubectl", "apply", "--dry-run=server", "-f", "-"], self.write(job)["trainjob.yaml"])

    def submit(self, job: Job, folder: Path) -> str:
        """``kubectl apply``; where it fails, what was already made is deleted.

        Returns:
            Namespace, name, recipe, claim and image, with spaces between.
        """
        file = str(folder / "trainjob.yaml")
        try:
            ask(["kubectl", "apply", "-f", file])
        except UserError:
            ask(["kubectl", "delete", "--ignore-not-found", "-f", file])
            raise
        return f"{_metadata(job)['namespace']} {job.name} {job.recipe} {job.need('claim', 'NAME')} {job.image}"

    def follow(self, handle: str, folder: Path) -> Outcome:
        """Prints the TrainJob's state until its end, then deletes the Job of the machines that prepare data.

        Args:
            handle: what :meth:`submit` returned; also the outcome's ``where``, since :meth:`fetch` needs its words.
            folder: of the job here; not read.
        """
        namespace, name, *_ = handle.split(" ")
        print(
            f"kd-launch: kubectl -n {namespace} logs -f -l jobset.sigs.k8s.io/jobset-name={name} shows its log"
        )

        def poll() -> tuple[str, Outcome | None]:
            """One look at the TrainJob: its state, and the outcome once it has ended."""
            command = ["kubectl", "-n", namespace, "get", "trainjob", name, "-o", "json"]
            answer = json_of(ask(command, timeout_s=ANSWER_S))
            state, message = _state(answer.get("status", {}).get("conditions", []))
            text = f"{state} {message}".rstrip()
            if state not in ("Complete", "Failed"):
                return text, None
            return text, Outcome(state == "Complete", text, where=handle)

        outcome = followed(name, poll, POLL_S)
        delete = ["kubectl", "-n", namespace, "delete", "--ignore-not-found", "job", f"{name}-data"]
        patiently(name, lambda: ask(delete), POLL_S)
        return outcome

    def fetch(self, outcome: Outcome, into: Path) -> Path | None:
        """Copies the run's folder out of the claim, through a pod that only sleeps and is deleted afterwards.

        Whole or not at all: it is copied beside ``into`` and renamed at the end. The outcome's ``where`` is the handle.

        Raises:
            UserError: the pod does not start within ten minutes, or the folder can't be copied.
        """
        namespace, name, recipe, claim, image = outcome.where.split(" ")
        pod = f"{name}-fetch"
        part = into.with_name(f".{into.name}.part")
        kubectl = ["kubectl", "-n", namespace]
        container: dict[str, object] = {
            "name": "fetch",
            "image": image,
            "command": ["sleep", "3600"],
        }
        spec = {**_pod(container, claim, {}, name), "restartPolicy": "Never"}
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": spec}
        copy = [*kubectl, "cp", f"{pod}:{RUNS}/{recipe}/{name}", str(part)]

        def copied() -> None:
            """One try; what an earlier one has left is removed, as kubectl would copy into it."""
            if part.exists():
                remove(part)
            ask(copy)

        patiently(name, lambda: ask([*kubectl, "apply", "-f", "-"], json.dumps(document)), POLL_S)
        try:
            ask([*kubectl, "wait", "--for=condition=Ready", f"pod/{pod}", "--timeout=600s"])
            patiently(name, copied, POLL_S)
            part.rename(into)
        finally:
            patiently(name, lambda: ask([*kubectl, "delete", "--wait=false", "pod", pod]), POLL_S)
        return into


def _document(kind: str, job: Job, content: Mapping[str, object]) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": kind, "metadata": _metadata(job), **content}


def _metadata(job: Job) -> dict[str, str]:
    return {"name": job.name, "namespace": job.options.get("namespace", "default")}


def _command(job: Job) -> list[str]:
    """The arguments of ``kd-train`` in a container: the user's files at :data:`FILES`, runs on the claim."""
    return [*job.command(FILES), f"runs_dir={RUNS}", f"name={job.name}"]


def _train_job(job: Job) -> dict[str, object]:
    """The TrainJob as a dict for YAML: a torchrun on each node, the run's folders on the claim.

    Raises:
        UserError: machines that are not counted as ``gpu:N`` or ``cpu:N``.
    """
    environment: list[dict[str, object]] = [
        {"name": "PET_RDZV_ID", "value": job.name},  # by it a restarted job finds its run again
        {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"},
    ]
    if job.data_machines:
        environment.append({"name": "KD_DATA_NODES", "value": str(job.data_machines.count)})
        environment.append(_token(job))
    trainer: dict[str, object] = {
        "image": job.need("image", "REGISTRY/kd:TAG"),
        "numNodes": job.machines.count,
        "numProcPerNode": job.processes or 1,
        "command": ["torchrun", "-m", "kd.cli"],
        "args": _command(job),
        "env": environment,
        "resourcesPerNode": _resources("instances", job.machines),
    }
    pod = _pod({"name": "node"}, job.need("claim", "NAME"), job.files, job.name)
    template = {"spec": {"template": {"spec": pod}}}
    patch = {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": template}]}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {
            "runtimeRef": {"name": job.options.get("runtime", "torch-distributed")},
            "trainer": trainer,
            "activeDeadlineSeconds": job.seconds,
            "runtimePatches": [{"manager": "kd.train/launch", "trainingRuntimeSpec": patch}],
        },
    }


def _token(job: Job) -> dict[str, object]:
    """The environment variable with Ray's token, from the job's secret."""
    return {
        "name": "RAY_AUTH_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": job.name, "key": "token"}},
    }


def _data_job(job: Job, machines: Machines) -> dict[str, object]:
    """The Job of the machines that prepare data, as a dict for YAML; they join the first training node.

    One that fails is started again, as often as Kubernetes does by default. :meth:`Kubernetes.follow` deletes the Job at
    the training's end.
    """
    head = f"{job.name}-node-0-0.{job.name}"
    container: dict[str, object] = {
        "name": "data",
        "image": job.image,
        "command": ["kd-train", *_command(job)],
        "env": [
            {"name": "KD_ROLE", "value": "data"},
            {"name": "MASTER_ADDR", "value": head},
            _token(job),
        ],
        "resources": _resources("data_instances", machines),
    }
    pod = {
        "restartPolicy": "OnFailure",
        **_pod(container, job.need("claim", "NAME"), job.files, job.name),
    }
    metadata = {**_metadata(job), "name": f"{job.name}-data"}
    counts = {"completions": machines.count, "parallelism": machines.count}
    spec = {**counts, "activeDeadlineSeconds": job.seconds, "template": {"spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _resources(key: str, machines: Machines) -> dict[str, dict[str, str]]:
    """A container's requests and limits: ``gpu:N`` or ``cpu:N`` of each machine.

    Args:
        key: the setting, for errors.
        machines: of the container's group.

    Raises:
        UserError: machines that are named in another way.
    """
    if machines.parts is None or machines.parts[0] not in ("gpu", "cpu"):
        raise UserError(
            f"{key}: Kubernetes counts gpu:N or cpu:N of each machine (2xgpu:8), got '{machines.type}'"
        )
    kind, count = machines.parts
    resource = "nvidia.com/gpu" if kind == "gpu" else "cpu"
    return {"requests": {resource: str(count)}, "limits": {resource: str(count)}}


def _pod(
    container: dict[str, object], claim: str, files: Mapping[str, Path], name: str
) -> dict[str, object]:
    """The spec of a pod whose container sees the claim at :data:`RUNS`, and the job's own files at :data:`FILES`.

    Args:
        container: its settings without mounts.
        claim: name of the PersistentVolumeClaim.
        files: the job's own; {}: none are mounted.
        name: of the job, and of its ConfigMap.
    """
    mounts = [{"name": "kd-runs", "mountPath": RUNS}]
    volumes: list[dict[str, object]] = [
        {"name": "kd-runs", "persistentVolumeClaim": {"claimName": claim}}
    ]
    if files:
        mounts.append({"name": "kd-files", "mountPath": FILES})
        volumes.append({"name": "kd-files", "configMap": {"name": name}})
    return {"containers": [{**container, "volumeMounts": mounts}], "volumes": volumes}


def _state(conditions: list[dict[str, str]]) -> tuple[str, str]:
    """A TrainJob's state and its message, by those of its conditions that hold.

    The state is ``Complete``, ``Failed`` or ``Suspended``, with the condition's message; ``Running`` where only others
    hold; ``Created`` where none does. Of these two there is no message.
    """
    messages = {}
    for condition in conditions:
        if condition.get("status") == "True":
            messages[condition.get("type", "")] = condition.get("message", "")
    for state in ("Complete", "Failed", "Suspended"):
        if state in messages:
            return state, messages[state]
    return ("Running" if messages else "Created"), ""
