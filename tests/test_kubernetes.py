"""The manifest for Kubernetes: right by Kubernetes' own schemas, and its pods' very command run as processes here."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.errors import RequestError, StoppedError
from lex_pretrain.monitor.metrics import read_records, read_steps
from tests.test_docs import check

ROOT = Path(__file__).parent.parent
MANIFEST = ROOT / "launch" / "kubernetes.yaml"
OBJECTS = list(yaml.safe_load_all(MANIFEST.read_text()))
JOB = next(item for item in OBJECTS if item["kind"] == "Job")
SERVICE = next(item for item in OBJECTS if item["kind"] == "Service")
POD = JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
ENVIRONMENT = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_every_object_fits_the_schema_of_the_first_and_last_version(item: dict[str, Any], version: str) -> None:
    """Strictly: an unknown field is an error."""
    kubernetes_validate.validate(item, version, strict=True)


def test_the_same_thing_is_the_same_everywhere() -> None:
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"] == int(ENVIRONMENT["NUM_PODS"])
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == int(ENVIRONMENT["PROCESSES_PER_POD"])
    assert SERVICE["metadata"]["name"] == POD["subdomain"]
    assert SERVICE["spec"]["selector"].items() <= JOB["spec"]["template"]["metadata"]["labels"].items()
    assert ENVIRONMENT["MASTER_ADDR"] == f"{JOB['metadata']['name']}-0.{SERVICE['metadata']['name']}"
    assert int(ENVIRONMENT["MASTER_PORT"]) == SERVICE["spec"]["ports"][0]["port"]
    claims = {item["metadata"]["name"] for item in OBJECTS if item["kind"] == "PersistentVolumeClaim"}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    used = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "emptyDir" not in volume}
    assert used == claims
    assert [mount["name"] for mount in CONTAINER["volumeMounts"]] == list(volumes)
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "launch" / "Containerfile").read_text(), re.MULTILINE)
    assert user is not None
    assert user.groups() == (str(POD["securityContext"]["runAsUser"]), str(POD["securityContext"]["runAsGroup"]))


def test_exit_codes_mean_what_the_command_line_promises() -> None:
    actions = {
        code: rule["action"]
        for rule in JOB["spec"]["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {"values": []})["values"]
    }
    assert actions == {RequestError.exit_code: "FailJob", StoppedError.exit_code: "Ignore"}


def test_it_trains_a_config_of_the_image_on_the_mounted_volumes() -> None:
    check(CONTAINER["args"])
    config = CONTAINER["args"][CONTAINER["args"].index("--config") + 1]
    assert (ROOT / config).is_file()
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in CONTAINER["volumeMounts"]}
    settings = dict(word.split("=") for word in CONTAINER["args"] if "=" in word)
    assert mounts["/" + settings["data.path"].split("/")[1]]
    assert not mounts["/" + settings["run.output_dir"].split("/")[1]]


@dataclass
class PodsHere:
    """Does for the manifest's pods on this machine what Kubernetes does, with processes in place of pods."""

    arguments: list[str]
    folder: Path
    pods: "dict[int, subprocess.Popen[str]]" = field(default_factory=dict)
    ends: list[tuple[int, int]] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self, index: int) -> None:
        environment = ENVIRONMENT | {
            "JOB_COMPLETION_INDEX": str(index),
            # This machine in place of the pods' network and GPUs.
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "PROCESSES_PER_POD": "1",
        }
        words = [re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], word) for word in CONTAINER["command"]]
        assert words[0] == "python"
        self.pods[index] = subprocess.Popen(
            [sys.executable, *words[1:], *self.arguments],
            cwd=self.folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def replace_failed(self) -> bool:
        """Start each pod that failed again, as the Job does; whether all have ended well."""
        for index, pod in self.pods.items():
            if (code := pod.poll()) is not None and code != 0:
                self.note_end(index)
                assert len(self.ends) <= JOB["spec"]["backoffLimit"], self.logs
                assert code != RequestError.exit_code, self.logs
                self.start(index)
        return all(pod.poll() == 0 for pod in self.pods.values())

    def note_end(self, index: int) -> None:
        pod = self.pods[index]
        self.logs.append(pod.communicate()[0])
        self.ends.append((index, pod.returncode))

    def run_until(self, done: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, (self.ends, self.logs)
            time.sleep(0.05)

    def kill(self, index: int) -> None:
        """All processes of a pod, as when its host is gone."""
        if self.pods[index].poll() is None:
            pod = psutil.Process(self.pods[index].pid)
            for process in (pod, *pod.children(recursive=True)):
                process.kill()


@pytest.fixture
def pods(tiny_config: Callable[..., Config], tmp_path: Path) -> Iterator[PodsHere]:
    save_config(tiny_config(train={"num_steps": 60}, checkpoint={"every_steps": 5}), tmp_path / "run.yaml")
    pods = PodsHere(["train", "--config", "run.yaml"], tmp_path)
    yield pods
    for index, pod in pods.pods.items():
        pods.kill(index)
        pod.wait()


def steps(pods: PodsHere) -> list[dict[str, Any]]:
    metrics = pods.folder / "run" / "metrics.jsonl"
    return read_steps(metrics) if metrics.is_file() else []


@pytest.mark.slow
def test_the_pods_train_together_and_one_that_is_lost_comes_back(pods: PodsHere) -> None:
    # Pods start in any order.
    pods.start(1)
    time.sleep(1)
    assert not steps(pods)
    pods.start(0)
    pods.run_until(lambda: len(steps(pods)) >= 12)
    pods.kill(1)
    pods.run_until(pods.replace_failed)
    assert {index for index, _ in pods.ends} == {0, 1}
    assert (1, -signal.SIGKILL) in pods.ends
    assert len(steps(pods)) == 60
    records = read_records(pods.folder / "run" / "metrics.jsonl")
    (resumed,) = [record["step"] for record in records if record.get("event") == "resumed"]
    assert resumed >= 5
    assert resumed % 5 == 0
    assert "2 processes" in pods.logs[0] + pods.logs[1]


@pytest.mark.slow
def test_a_pod_that_is_evicted_makes_all_save_and_go_on(pods: PodsHere) -> None:
    pods.start(0)
    pods.start(1)
    pods.run_until(lambda: len(steps(pods)) >= 12)
    # As for a container: to its first process alone.
    pods.pods[1].terminate()
    pods.run_until(lambda: all(pod.poll() is not None for pod in pods.pods.values()))
    saved = steps(pods)[-1]["step"]
    pods.run_until(pods.replace_failed)
    assert sorted(pods.ends) == [(0, StoppedError.exit_code), (1, StoppedError.exit_code)]
    records = read_records(pods.folder / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if record.get("event") == "resumed"] == [saved]
    assert len(steps(pods)) == 60


def test_a_pod_that_is_evicted_before_it_trains_ends_as_told(pods: PodsHere) -> None:
    """The first process of a container ignores signals that it does not handle; here it waits for pod 0 by then."""
    pods.start(1)
    time.sleep(8)
    pods.pods[1].terminate()
    pods.run_until(lambda: pods.pods[1].poll() is not None, seconds=20)
    assert pods.pods[1].returncode == StoppedError.exit_code
