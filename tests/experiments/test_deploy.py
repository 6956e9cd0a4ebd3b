"""The manifest for Kubeflow's training operator, against the models that the operator's project generates from its schema
(PyPI's ``kubeflow-training``; a pod's parts are models of ``kubernetes``): names, types, required fields. And what the operator
and our program need beside the schema."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
from programs import ROOT

from examples import elastic

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra: kubernetes)")
models = pytest.importorskip("kubeflow.training.models", reason="kubeflow-training is not installed (extra: kubernetes)")

PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}


def built(value: Any, kind: str, at: str) -> Any:
    """A value of the manifest as the model ``kind``, which checks required fields and what values may be."""
    if found := re.fullmatch(r"list\[(.*)\]", kind):
        assert isinstance(value, list), f"{at}: not a list"
        return [built(each, found[1], f"{at}[{number}]") for number, each in enumerate(value)]
    if found := re.fullmatch(r"dict\(str, (.*)\)", kind):
        assert isinstance(value, dict), f"{at}: not a map"
        return {key: built(each, found[1], f"{at}.{key}") for key, each in value.items()}
    if kind in PLAIN:
        exact = not (isinstance(value, bool) and kind != "bool")
        assert exact and isinstance(value, PLAIN[kind]), f"{at}: {value!r} is not of type {kind}"
        return value
    model = getattr(models, kind)
    names = {key: name for name, key in model.attribute_map.items()}
    assert isinstance(value, dict), f"{at}: not a map"
    assert value.keys() <= names.keys(), f"{at}: no field {', '.join(value.keys() - names.keys())} in {kind}"
    return model(**{names[key]: built(each, model.openapi_types[names[key]], f"{at}.{key}") for key, each in value.items()})


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "examples/deploy/pytorchjob.yaml").read_text())


def test_the_manifest_is_of_the_schema(manifest: dict[str, Any]) -> None:
    job = built(manifest, "KubeflowOrgV1PyTorchJob", "job")
    assert (job.api_version, job.kind) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job.spec.pytorch_replica_specs["Worker"]
    policy = job.spec.elastic_policy
    assert list(job.spec.pytorch_replica_specs) == ["Worker"]  # a master beside an elastic policy is another kind of job
    assert policy.min_replicas == policy.max_replicas == worker.replicas and policy.max_restarts
    (container,) = worker.template.spec.containers
    assert container.name == "pytorch"
    (secret,) = [each for each in container.env if each.name == "RDMARPC_SECRET"]
    assert secret.value is None and secret.value_from.secret_key_ref.key == "secret"


def test_the_program_takes_its_arguments(manifest: dict[str, Any]) -> None:
    container = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    launcher, program, *arguments = container["command"]
    assert launcher == "torchrun" and (ROOT / program).is_file()
    given = elastic.arguments(arguments)
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert str(given.folder) in mounts and given.peer_timeout == 30.0


def worker(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]


def pytorch(job: dict[str, Any]) -> dict[str, Any]:
    return worker(job)["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job["spec"].update(elasticpolicy={}),
        lambda job: job["spec"].update(nprocPerNode=1),
        lambda job: job["spec"].pop("pytorchReplicaSpecs"),
        lambda job: job["spec"]["elasticPolicy"].update(maxRestarts="3"),
        lambda job: worker(job).update(replica=2),
        lambda job: pytorch(job).pop("name"),
        lambda job: pytorch(job)["env"][0]["valueFrom"]["secretKeyRef"].pop("key"),
        lambda job: pytorch(job).update(command="torchrun"),
        lambda job: pytorch(job)["resources"]["limits"].update(cpu=True),
    ],
)
def test_a_manifest_that_is_not_of_the_schema_is_found(
    manifest: dict[str, Any], spoil: Callable[[dict[str, Any]], Any]
) -> None:
    spoiled = copy.deepcopy(manifest)
    spoil(spoiled)
    with pytest.raises((AssertionError, ValueError)):
        built(spoiled, "KubeflowOrgV1PyTorchJob", "job")
