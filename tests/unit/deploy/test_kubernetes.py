"""The manifests are valid, agree with the image and with one another, and start what our command lines take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.kubernetes import join
from swarm_cli import command_line as client
from swarm_cli.commands.serve import serve_command
from swarm_gateway.app import serving
from swarm_server import command_line as server
from tests.unit.deploy.exported import state_text
from tests.unit.deploy.places import DEPLOY
from tests.unit.deploy.test_containers import API_PORT, METRICS_PORT, instructions, last, service
from tests.unit.support import http_server

KUBERNETES = DEPLOY / "kubernetes"
KUSTOMIZATION = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
MANIFESTS = [
    manifest for name in KUSTOMIZATION["resources"] for manifest in yaml.safe_load_all((KUBERNETES / name).read_text())
]
PEER = "QmR4TDUsi3uun3zmW681rpWdk4avvY9jhyfFH5E55pPZNm"


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in MANIFESTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


SERVERS, GATEWAY = manifest("StatefulSet", "swarm-server"), manifest("Deployment", "swarm-gateway")
PODS = {"server": SERVERS["spec"]["template"]["spec"], "gateway": GATEWAY["spec"]["template"]["spec"]}


def container(name: str) -> dict[str, Any]:
    (found,) = PODS[name]["containers"]
    assert found["name"] == name
    return found


def settings() -> dict[str, str]:
    (found,) = [each["literals"] for each in KUSTOMIZATION["configMapGenerator"] if each["name"] == "swarm"]
    return dict(each.split("=", 1) for each in found)


def argv(name: str) -> list[str]:
    """What the container gives to ``swarm``, as Kubernetes fills it in."""
    values = settings() | {"POD_IP": "10.1.2.3"}
    arguments = list(container(name)["args"])
    for variable, value in values.items():
        arguments = [each.replace(f"$({variable})", value) for each in arguments]
    assert not [each for each in arguments if "$(" in each]
    return arguments


# ------------------------------------------------------------ the manifests


def test_every_file_is_used() -> None:
    assert {path.name for path in KUBERNETES.glob("*.yaml")} == {*KUSTOMIZATION["resources"], "kustomization.yaml"}
    assert [file for each in KUSTOMIZATION["configMapGenerator"] for file in each.get("files", [])] == ["join.py"]


@pytest.mark.parametrize("resource", MANIFESTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_schemas_of_kubernetes(resource: dict[str, Any]) -> None:
    validation = pytest.importorskip("kubernetes_validate", reason="it is not there: pip install kubernetes-validate")
    validation.validate(resource, "1.34", strict=True)


def test_kubectl_puts_them_together(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not there")
    place = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, place, ignore=shutil.ignore_patterns("__pycache__", "secrets"))
    (place / "secrets").mkdir()
    (place / "secrets/api-key").write_text("sk-ada\n")
    done = subprocess.run(["kubectl", "kustomize", str(place)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert {each["metadata"]["namespace"] for each in built if each["kind"] != "Namespace"} == {"swarm"}
    (stateful,) = [each for each in built if each["kind"] == "StatefulSet"]
    names = {each["metadata"]["name"] for each in built}
    pod = stateful["spec"]["template"]["spec"]
    assert {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume} <= names
    assert pod["containers"][0]["image"] == "swarm-lm:cpu"


def test_selectors_find_pods_and_names_exist() -> None:
    for workload in (SERVERS, GATEWAY):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    headless, http = manifest("Service", "swarm-servers"), manifest("Service", "swarm-gateway")
    assert headless["spec"]["clusterIP"] == "None" and SERVERS["spec"]["serviceName"] == "swarm-servers"
    assert headless["spec"]["selector"] == SERVERS["spec"]["selector"]["matchLabels"]
    assert http["spec"]["selector"] == GATEWAY["spec"]["selector"]["matchLabels"]
    policy = manifest("NetworkPolicy", "swarm-server")["spec"]
    assert policy["podSelector"] == SERVERS["spec"]["selector"]
    allowed = {each["port"] for rule in policy["ingress"] for each in rule["ports"]}
    assert allowed == {each["port"] for each in headless["spec"]["ports"]}
    for name in PODS:
        env = {each["name"]: each.get("value") for each in container(name)["env"]}
        assert env["SWARM_SERVERS"] == "swarm-servers"
        mounted = {each["name"] for each in container(name)["volumeMounts"]}
        claims = [each["metadata"]["name"] for each in SERVERS["spec"]["volumeClaimTemplates"] if name == "server"]
        assert mounted == {*(volume["name"] for volume in PODS[name]["volumes"]), *claims}
    (secret,) = [volume["secret"]["secretName"] for volume in PODS["gateway"]["volumes"] if "secret" in volume]
    assert secret in [each["name"] for each in KUSTOMIZATION["secretGenerator"]]


# ------------------------------------------------------------ what the containers start


def test_servers_are_accepted() -> None:
    name, *arguments = argv("server")
    config = server.read_config(server.parse_args(arguments))
    assert name == "server" and container("server")["command"] == ["python3", "/etc/swarm/join.py", "swarm"]
    assert (config.host, config.metrics_host, config.metrics_port) == ("10.1.2.3", "10.1.2.3", METRICS_PORT)
    ports = {each["name"]: each["containerPort"] for each in container("server")["ports"]}
    assert ports == {"grpc": config.port, "libp2p": config.dht_port, "metrics": config.metrics_port}
    assert {str(port) for port in (*ports.values(), API_PORT)} == set(last("EXPOSE").split())
    assert (config.metrics_port, config.dht_port) == (join.METRICS_PORT, join.DHT_PORT)
    assert PODS["server"]["terminationGracePeriodSeconds"] > config.drain_timeout_s + 20
    mounts = {each["mountPath"]: each["name"] for each in container("server")["volumeMounts"]}
    assert config.identity is not None and mounts[str(config.identity.parent)] == "data"


def test_the_gateway_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("sk-ada\n")
    (keys,) = [each["mountPath"] for each in container("gateway")["volumeMounts"] if each["name"] == "keys"]
    args = client.parse_args([each.replace(keys, str(tmp_path)) for each in argv("gateway")])
    serve_command(args)
    found = serving.ServeSettings.from_flags(args)
    assert (found.port, found.keys) == (API_PORT, ("sk-ada",))
    assert [each["containerPort"] for each in container("gateway")["ports"]] == [API_PORT]
    hook = container("gateway")["lifecycle"]["preStop"]["exec"]["command"]
    assert PODS["gateway"]["terminationGracePeriodSeconds"] > int(hook[1]) + serving._DRAIN_S + 10


def test_both_take_the_addresses_that_the_script_adds() -> None:
    peer = f"/ip4/10.1.2.4/tcp/31338/p2p/{PEER}"
    added = ["--initial-peers", peer, peer]
    assert server.parse_args([*argv("server")[1:], *added]).initial_peers == [peer, peer]
    assert client.parse_args([*argv("gateway"), *added]).initial_peers == [peer, peer]


def test_probes_ask_what_is_there() -> None:
    asked = container("server")
    copied = [rest.split()[-1] for name, rest in instructions() if name == "COPY"]
    script = asked["readinessProbe"]["exec"]["command"]
    assert script[0] == "python3" and script[1] in copied
    env = {each["name"]: each.get("value") for each in asked["env"]}
    assert env["SWARM_HEALTH_URL"] == f"http://$(POD_IP):{METRICS_PORT}/metrics"
    assert asked["livenessProbe"]["httpGet"] == {"path": "/metrics", "port": "metrics"}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container("gateway")[probe]["httpGet"]
        assert get == {"path": "/health", "port": "http"}
        assert service("gateway")["environment"]["SWARM_HEALTH_URL"].endswith(get["path"])


def test_they_may_do_as_little_as_with_compose() -> None:
    compose = service("server")
    for name, pod in PODS.items():
        security = container(name)["securityContext"]
        assert security["readOnlyRootFilesystem"] is compose["read_only"] is True
        assert security["capabilities"]["drop"] == compose["cap_drop"] == ["ALL"]
        assert security["allowPrivilegeEscalation"] is False and pod["automountServiceAccountToken"] is False
        assert str(pod["securityContext"]["runAsUser"]) == last("USER") and pod["securityContext"]["runAsNonRoot"]
        written = {each["mountPath"] for each in container(name)["volumeMounts"] if not each.get("readOnly")}
        assert written == {"/tmp", "/var/cache/swarm", "/var/lib/swarm"}
        assert "memory" in container(name)["resources"]["limits"]


# ------------------------------------------------------------ how pods find the swarm


def test_a_servers_address_is_made_of_its_metrics() -> None:
    with http_server(lambda _request: (200, state_text(PEER).encode())) as url:
        port = int(url.rpartition(":")[2])
        assert join.member("127.0.0.1", port) == f"/ip4/127.0.0.1/tcp/31338/p2p/{PEER}"
    assert join.member("127.0.0.1", 9) is None


@pytest.mark.parametrize(
    ("answers", "is_first", "expected", "pauses"),
    [
        ({}, True, [], 0),
        ({"10.0.0.2": [None]}, True, [], join._MOST_TRIES - 1),  # it waits for this one
        ({"10.0.0.2": [None, "b"], "10.0.0.3": [None]}, True, ["b"], 1),
        ({"10.0.0.2": ["b"], "10.0.0.3": ["c"]}, False, ["b", "c"], 0),
        ({"10.0.0.2": [None] * 20 + ["b"]}, False, ["b"], 20),
    ],
)
def test_who_waits_for_whom(
    answers: dict[str, list[str | None]], is_first: bool, expected: list[str], pauses: int, monkeypatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(join, "addresses", lambda _service: ["10.0.0.1", *answers])
    monkeypatch.setattr(join, "member", lambda address: answers[address][min(len(slept), len(answers[address]) - 1)])
    monkeypatch.setattr(join.time, "sleep", slept.append)
    assert join.members("swarm-servers", "10.0.0.1", is_first) == expected
    assert len(slept) == pauses


def test_the_script_becomes_the_command() -> None:
    environment = {"SWARM_SERVERS": "127.0.0.1", "POD_IP": "127.0.0.1", "PATH": os.environ["PATH"]}
    code = f"import socket, sys; sys.path.insert(0, {str(KUBERNETES)!r}); socket.gethostname = lambda: 'swarm-server-0'"
    run = f"{code}; import join; sys.argv = ['join.py', 'echo', 'server', '--port=1']; join.main()"
    done = subprocess.run([sys.executable, "-c", run], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "server --port=1\n", "")
