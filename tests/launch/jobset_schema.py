# SPDX-License-Identifier: Apache-2.0
"""The parts of Kubernetes' API that docs/launch/jobset.yaml uses: jobset.x-k8s.io/v1alpha2,
batch/v1 and v1. A field that is none of these, or of another type, is an error."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Count = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Strict(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, strict=True, extra="forbid")


class Variable(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str  # a number would have to be quoted


class ContainerPort(Strict):
    container_port: Port


class Resources(Strict):
    limits: dict[str, int | str]


class Mount(Strict):
    name: Name
    mount_path: Annotated[str, Field(pattern="^/")]


class Container(Strict):
    name: Name
    image: str
    command: list[str]
    env: list[Variable] = []
    resources: Resources | None = None
    ports: list[ContainerPort] = []
    volume_mounts: list[Mount] = []


class Claim(Strict):
    claim_name: Name


class Volume(Strict):
    name: Name
    persistent_volume_claim: Claim


class Pod(Strict):
    restart_policy: Literal["Never", "OnFailure"]  # a job takes no other
    termination_grace_period_seconds: Count
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume] = []


class PodTemplate(Strict):
    spec: Pod


class Job(Strict):
    backoff_limit: Count
    completion_mode: Literal["Indexed", "NonIndexed"] = "NonIndexed"
    completions: Count = 1
    parallelism: Count = 1
    template: PodTemplate


class JobTemplate(Strict):
    spec: Job


class ReplicatedJob(Strict):
    name: Name
    replicas: Count
    template: JobTemplate


class Network(Strict):
    enable_dns_hostnames: Annotated[bool, Field(alias="enableDNSHostnames")]


class JobSetSpec(Strict):
    network: Network
    replicated_jobs: Annotated[list[ReplicatedJob], Field(min_length=1)]


class Metadata(Strict):
    name: Name


class JobSet(Strict):
    api_version: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec
