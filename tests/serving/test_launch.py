# SPDX-License-Identifier: Apache-2.0
"""launch/ of a server: the image, the Kubernetes manifest, the Grafana dashboard.

The image is built and started where a Docker daemon runs; elsewhere what it is made of is.
"""

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from switchx.cli import serve
from switchx.cli.main import _parse, _parser
from switchx.serving.app import HEALTH
from switchx.serving.limits import Limits
from switchx.serving.metrics import Metrics
from tests.processes import ROOT
from tests.serving import served
from tests.training.saved_runs import save_run

LAUNCH = ROOT / "launch"
DOCKERFILE = LAUNCH / "Dockerfile"
# The newest Kubernetes and one that is still in use.
KUBERNETES = ("1.31", "1.36")


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict]:
    documents = yaml.safe_load_all((LAUNCH / "serve.yaml").read_text())
    return {each["kind"]: each for each in documents}


@pytest.fixture
def pod(manifest) -> dict:
    return manifest["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture
def container(pod) -> dict:
    (container,) = pod["containers"]
    return container


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_manifest_is_of_kubernetes_schemas(manifest, version):
    """Strictly: no field that there is none of."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for each in manifest.values():
        validate.validate(each, version, strict=True)
    manifest["Service"]["spec"]["a_field_that_is_none"] = 1
    with pytest.raises(validate.ValidationError):
        validate.validate(manifest["Service"], version, strict=True)
    del manifest["Service"]["spec"]["a_field_that_is_none"]


def test_its_options_exist_and_its_parts_fit(manifest, pod, container):
    arguments = _parse(_parser(), ["serve", *container["args"]])
    ((_, folder),) = arguments.model
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert {each["name"] for each in mounts.values()} == set(volumes)
    assert folder.startswith("/models/") and mounts["/models"]["readOnly"]
    environment = {each["name"]: each for each in container["env"]}
    assert serve.TOKEN_VARIABLE in environment  # other machines reach it
    cache = volumes[mounts[environment["XDG_CACHE_HOME"]["value"]]["name"]]
    claim = manifest["PersistentVolumeClaim"]["metadata"]["name"]
    assert cache["persistentVolumeClaim"]["claimName"] == claim
    (port,) = container["ports"]
    assert port["containerPort"] == arguments.port
    (of_service,) = manifest["Service"]["spec"]["ports"]
    assert of_service["targetPort"] == port["name"]
    labels = manifest["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        manifest["Service"]["spec"]["selector"],
        manifest["Deployment"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()


def test_probes_ask_routes_of_health_and_a_pod_has_the_time_to_answer(container, pod):
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
    assert set(paths.values()) <= set(HEALTH)
    # A pod that compiles or drains is alive, and takes no requests.
    assert paths["liveness"] == "/healthz" and paths["readiness"] == "/healthz/ready"
    ports = {probe["httpGet"]["port"] for probe in probes.values()}
    assert ports == {each["name"] for each in container["ports"]}
    _, before_s = container["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = _parse(_parser(), ["serve", *container["args"]]).drain_timeout_s
    assert drain_s == Limits().drain_timeout_s
    needed_s = float(before_s) + drain_s + serve.STOPPING_S
    assert needed_s < pod["terminationGracePeriodSeconds"] < needed_s + 30


@pytest.fixture(scope="module")
def image():
    parser = pytest.importorskip("dockerfile_parse", reason="needs dockerfile-parse")
    return parser.DockerfileParser(str(DOCKERFILE)).structure


def copied(image):
    """What is copied from the repository, and where to."""
    for each in image:
        if each["instruction"] == "COPY" and not each["value"].startswith("--from"):
            *sources, target = each["value"].split()
            yield from ((source, target) for source in sources)


def test_the_image_is_made_of_what_is_there(image, pod, container):
    *_, entry = [each["value"] for each in image if each["instruction"] == "ENTRYPOINT"]
    words = json.loads(entry)  # not of a shell, which would keep signals to itself
    assert words[:4] == ["tini", "--", "switchx", "serve"]
    _parse(_parser(), [*words[3:], *container["args"]])
    *_, user = [each["value"] for each in image if each["instruction"] == "USER"]
    assert int(user) == pod["securityContext"]["runAsUser"] > 0
    (port,) = [each["value"] for each in image if each["instruction"] == "EXPOSE"]
    assert int(port) == container["ports"][0]["containerPort"]
    for source, _ in copied(image):
        assert (ROOT / source).exists(), source
    stages = [each["value"] for each in image if each["instruction"] == "FROM"]
    assert len(stages) == 2 and len({each.split()[0] for each in stages}) == 1


@pytest.mark.slow
def test_what_is_copied_into_the_image_can_be_installed(image, tmp_path):
    """The `pip install` of the image, without what it downloads."""
    (tmp_path / "source").mkdir()
    for source, target in copied(image):
        if (ROOT / source).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, tmp_path / "source" / target, ignore=skip)
        else:
            shutil.copy(ROOT / source, tmp_path / "source" / target)
    install = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    command = [sys.executable, "-m", *map(str, install), "."]
    subprocess.run(command, cwd=tmp_path / "source", check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "switchx/serving/page.html" in names
    assert "switchx/configs/runs/pretrain_tiny.gin" in names


def docker(*words, **settings) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_container_answers_reloads_and_stops(tmp_path):
    daemon = shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True)
    if not daemon or daemon.returncode:
        pytest.skip("needs docker and its daemon")
    save_run(tmp_path / "runs/tiny", served.CONFIG)
    subprocess.run(["chmod", "-R", "a+rX", str(tmp_path)], check=True)
    docker("build", "-f", "launch/Dockerfile", "-t", "switchx-test", ".", cwd=ROOT)
    name = docker(
        "run", "--detach", "--publish=127.0.0.1::8000", f"--volume={tmp_path}/runs:/models:ro",
        "--env=SWITCHX_TOKEN=0123456789abcdef", "switchx-test", "--model=tiny=/models/tiny",
        "--warm_up_tokens=0",
    )  # fmt: skip
    try:
        host, _, port = docker("port", name, "8000").partition("\n")[0].rpartition(":")
        end_s = time.monotonic() + 300
        while "  ready" not in docker("logs", name) and time.monotonic() < end_s:
            time.sleep(1)
        headers = {"Authorization": "Bearer 0123456789abcdef"}
        status, _ = served.post((host, int(port)), {"inputs": [[5, 6]]}, headers=headers)
        assert status == 200
        docker("kill", f"--signal={signal.SIGHUP.name}", name)
        docker("stop", "--time", "35", name)
        assert docker("inspect", "--format={{.State.ExitCode}}", name) == "0"
    finally:
        docker("rm", "--force", name)


# The dashboard.


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads((LAUNCH / "grafana_serving.json").read_text())


def queries(dashboard) -> list[str]:
    return [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]


def exposed() -> dict[str, set[str]]:
    """Names that /metrics has, and the labels of each."""
    metrics = Metrics()
    metrics.of("tiny")
    metrics.built = lambda: [("tiny", 5)]
    metrics.responses.labels("200").inc()
    families = text_string_to_metric_families(metrics.text().decode())
    return {each.name: set(each.labels) for family in families for each in family.samples}


def family(name: str) -> str:
    """The name of a metric without what samples add."""
    return re.sub(r"_(total|created|bucket|sum|count)$", "", name)


def test_metrics_and_labels_of_its_queries_are_those_of_the_server(dashboard):
    """And of its variables; all metrics of the server are on it."""
    there, asked = exposed(), set()
    variables = [
        each["query"]["query"]
        for each in dashboard["templating"]["list"]
        if each["type"] == "query"
    ]
    assert len(queries(dashboard)) >= 20
    for query in [*queries(dashboard), *variables]:
        names = set(re.findall(r"\b(?:switchx:|process_)\w+", query))
        assert names and names <= there.keys(), query
        asked |= names
        labels = set().union(*(there[name] for name in names)) | {"instance", "job"}
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", query)
        used = set(re.findall(r'(\w+)=~?"', query)) | set(", ".join(grouped).split(", "))
        assert used - {""} <= labels, query
    assert {family(name) for name in there if ":" in name} == {
        family(name) for name in asked if ":" in name
    }
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.search(r"\bby \(([^)]*)\)", target["expr"])
            kept = set(grouped[1].split(", ")) if grouped else {"instance", "job"}
            assert wanted <= kept, target


def test_its_queries_are_promql_and_its_panels_stand_beside_each_other(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        assert (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
    sources = {str(target["datasource"]) for p in panels for target in p.get("targets", ())}
    assert sources == {str({"type": "prometheus", "uid": "${datasource}"})}
    parser = pytest.importorskip("promql_parser", reason="needs promql-parser")
    for query in queries(dashboard):
        parser.parse(query.replace("$__rate_interval", "1m"))
