"""A run in containers, for real: Docker builds the images, Compose starts them, things are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.compose import IMAGES, SERVICES, Project, need_compose, need_docker, well
from tests.deploy.conftest import ROOT, run

pytestmark = pytest.mark.timeout(3600)

MEGABYTE = 1_000_000
ACTORS = 3
SHARDS = 2
DASHBOARD = ROOT / "deploy" / "monitoring" / "grafana" / "dashboards" / "troupe.json"
ALL_PROFILES = ("--profile", "gpu", "--profile", "monitoring")


# ---------------------------------------------------------------- the file


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """Every service of the file, with all profiles, as Compose understands it."""
    need_compose()
    text = Project("troupe-test-file", {}).compose(*ALL_PROFILES, "config", "--format", "json")
    return dict(json.loads(text[text.index("{") :])["services"])


def test_nothing_has_more_rights_than_it_needs(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only") or name == "grafana", name
        assert service["restart"] in ("on-failure", "unless-stopped"), name
        assert int(service["deploy"]["resources"]["limits"]["memory"]) > 0, name
        assert not service.get("privileged"), name
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name


def test_every_service_gets_its_own_keys_and_no_others(services: dict[str, Any]) -> None:
    for name, service in services.items():
        mounted = {one["source"]: one for one in service.get("volumes", []) if "keys" in one["source"]}
        role = name.removesuffix("-gpu").removesuffix("-peer")
        if name == "keys":
            assert service["network_mode"] == "none"
        elif role in ("learner", "replay", "actor", "evaluator"):
            assert list(mounted) == [f"keys-{role}"], name
            assert mounted[f"keys-{role}"]["read_only"], name
        else:
            assert not mounted, name


def test_the_board_asks_for_a_token_where_its_port_is_published_to_others() -> None:
    need_compose()
    text = Project("troupe-test-file", {"TROUPE_BIND": "0.0.0.0"}).compose("config", "--format", "json")
    board = json.loads(text[text.index("{") :])["services"]["board"]
    assert [port["host_ip"] for port in board["ports"]] == ["0.0.0.0"]
    # `troupe board` goes by this one: see tests/board/test_command.py.
    assert board["environment"]["TROUPE_BOARD_PUBLISHED"] == "0.0.0.0:6007"


def test_nobody_logs_in_to_grafana(services: dict[str, Any]) -> None:
    """Its admin has a password that everybody knows; without a form he would come by the API."""
    environment = services["grafana"]["environment"]
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_what_trains_has_no_way_out(services: dict[str, Any]) -> None:
    for name in ("learner", "learner-gpu", "learner-peer", "replay", "actor", "evaluator"):
        assert list(services[name]["networks"]) == ["run"], name
        assert not services[name].get("ports"), name


def test_shards_and_what_a_mistake_does(services: dict[str, Any]) -> None:
    for name in (*SERVICES, "learner-gpu", "learner-peer"):
        assert services[name]["environment"]["TROUPE_HOLD"] == "1", name
    # Each replica has an address and a number of its own; one name for all would be anybody's.
    assert "TROUPE_ADVERTISE" not in services["replay"]["environment"]
    assert services["replay"]["environment"]["TROUPE_INDEX"] == "free"
    text = Project("troupe-test-file", {"TROUPE_REPLAY__SHARDS": "3"}).compose("config", "--format", "json")
    scaled = json.loads(text[text.index("{") :])["services"]
    assert scaled["replay"]["deploy"]["replicas"] == 3
    assert scaled["learner"]["environment"]["TROUPE_REPLAY__SHARDS"] == "3"


def test_a_run_file_is_mounted_where_the_learner_looks_for_it(services: dict[str, Any]) -> None:
    mounted = [one for one in services["learner"]["volumes"] if one["target"] == "/etc/troupe/run.toml"]
    assert [(one["type"], one["source"], one["read_only"]) for one in mounted] == [
        ("bind", "/dev/null", True)
    ]
    assert not services["learner"]["environment"]["TROUPE_RUN_FILE"]
    file = "deploy/kubernetes/base/my.toml"
    env = {"TROUPE_RUN": "my", "TROUPE_RUN_FILE": file}
    text = Project("troupe-test-file", env).compose("config", "--format", "json")
    learner = json.loads(text[text.index("{") :])["services"]["learner"]
    assert learner["environment"]["TROUPE_RUN_FILE"] == "/etc/troupe/run.toml"
    assert learner["environment"]["TROUPE_RUN_DIR"] == "/var/lib/troupe/runs/my"
    [mounted] = [one for one in learner["volumes"] if one["target"] == "/etc/troupe/run.toml"]
    assert mounted["source"] == str(ROOT / file)


def test_more_learners_meet_in_the_network_of_the_run(services: dict[str, Any]) -> None:
    peer = services["learner-peer"]
    assert (peer["command"], peer["deploy"]["replicas"]) == (["learner-peer"], 0)
    assert peer["image"] == services["learner"]["image"]
    # An internal network that nobody else is in, whatever addresses Docker gives it.
    assert services["learner"]["environment"]["TROUPE_NET__LEARNER_NETWORK"] == "own"
    text = Project("troupe-test-file", {"TROUPE_LEARNER_PEERS": "3"}).compose("config", "--format", "json")
    file = json.loads(text[text.index("{") :])
    assert file["services"]["learner-peer"]["deploy"]["replicas"] == 3
    assert file["networks"]["run"]["internal"] is True


def test_every_variable_of_a_field_reaches_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    need_compose()
    fields = re.findall(r"TROUPE_\w+__\w+", (ROOT / "deploy" / "docker" / "fields.yml").read_text())
    assert "TROUPE_REPLAY__CAPACITY_ITEMS" in fields
    project = Project("troupe-test-file", dict.fromkeys(fields, "7"))
    text = project.compose("config", "--format", "json")
    environment = json.loads(text[text.index("{") :])["services"]["learner"]["environment"]
    assert [name for name in fields if environment.get(name) != "7"] == []


@pytest.mark.parametrize(
    "script", sorted((ROOT / "deploy" / "docker").glob("*.sh")), ids=lambda one: one.name
)
def test_scripts_of_the_images_are_sound(script: Path) -> None:
    assert "set -euo pipefail" in script.read_text()
    run("bash", "-n", script, cwd=ROOT, env=dict(os.environ))
    if shutil.which("shellcheck"):
        run("shellcheck", "--severity=warning", script, cwd=ROOT, env=dict(os.environ))


@pytest.mark.parametrize(
    ("variables", "beginning"),
    [
        ({"TROUPE_PRESET": "pong-apex"}, "pong-apex --resume"),
        ({"TROUPE_PRESET": "pong-apex", "TROUPE_RUN_FILE": "/a/run.toml"}, "/a/run.toml --resume"),
        ({"TROUPE_PRESET": "pong-apex", "TROUPE_RUN_FILE": ""}, "pong-apex --resume"),
        ({}, "--inference tcp://0.0.0.0:5552"),
    ],
)
def test_a_learner_begins_from_its_file_or_preset(
    variables: dict[str, str], beginning: str, tmp_path: Path
) -> None:
    program = tmp_path / "troupe"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    own = {name: text for name, text in os.environ.items() if not name.startswith("TROUPE_")}
    folders = {"TROUPE_BIN": str(tmp_path), "TROUPE_RUN_DIR": str(tmp_path / "run"), "TROUPE_KEYS": "keys"}
    script = ROOT / "deploy" / "scripts" / "start.sh"
    said = run("bash", script, "learner", cwd=tmp_path, env={**own, **folders, **variables})
    assert said.strip().endswith(beginning)


# ---------------------------------------------------------------- the images


@pytest.fixture(scope="module")
def images() -> dict[str, dict[str, Any]]:
    """Every image by its target, built unless TROUPE_TEST_IMAGES names the beginning of ready ones' names."""
    need_docker()
    prefix = os.environ.get("TROUPE_TEST_IMAGES", "")
    if not prefix:
        prefix = "troupe-test"
        project = Project("troupe-test-build", {"TROUPE_IMAGES": prefix})
        project.compose("build", timeout_s=3000)  # replay has the image of `keys`
    found = {}
    for target in IMAGES:
        words = ["docker", "image", "inspect", f"{prefix}-{target}:latest"]
        found[target] = json.loads(run(*words, cwd=ROOT, env=dict(os.environ)))[0] | {"prefix": prefix}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("target", IMAGES)
def test_an_image_runs_without_rights_and_says_what_it_is(images: dict[str, Any], target: str) -> None:
    config = images[target]["Config"]
    assert config["User"] == "10001:10001"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["/opt/troupe/bin/troupe-start"]
    assert config["Healthcheck"]["Test"] == ["CMD", "/opt/troupe/bin/troupe-health"]
    assert config["Labels"]["org.opencontainers.image.title"] == f"troupe-{target}"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


@pytest.mark.slow
def test_the_image_of_replay_is_small_and_has_no_torch(images: dict[str, Any]) -> None:
    assert images["replay"]["Size"] < 300 * MEGABYTE
    image = f"{images['replay']['prefix']}-replay"
    words = [
        "docker",
        "run",
        "--rm",
        "--network",
        "none",
        "--entrypoint",
        "/opt/troupe/venv/bin/python",
        image,
    ]
    output = run(*words, "-c", "import torch", cwd=ROOT, env=dict(os.environ), ok=(1,))
    assert "No module named 'torch'" in output


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def project(images: dict[str, Any]) -> Iterator[Project]:
    """A run of CartPole with three actors and two shards; the next tests go on with it, one by one."""
    with socket.socket() as probe, socket.socket() as other:
        probe.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, board_port = (str(each.getsockname()[1]) for each in (probe, other))
    env = {
        "TROUPE_IMAGES": images["replay"]["prefix"],
        "TROUPE_PRESET": "cartpole-apex",
        "TROUPE_TENSORBOARD_PORT": os.environ.get("TROUPE_TENSORBOARD_PORT", port),
        "TROUPE_BOARD_PORT": board_port,
        "TROUPE_RUN__TOTAL_STEPS": "50000000",
        "TROUPE_RUN__LOG_EVERY_S": "2",
        "TROUPE_LEARNER__CHECKPOINT_PERIOD_S": "5",
        "TROUPE_REPLAY__MIN_ITEMS": "500",
        "TROUPE_REPLAY__SHARDS": str(SHARDS),
        "TROUPE_EVALUATOR__EPISODES": "1",
        "TROUPE_EVALUATOR__SLOTS": "1",
        "TROUPE_EVALUATOR__VIDEO": "false",
    }
    project = Project(f"troupe-test-{os.getpid()}", env)
    try:
        project.compose("up", "-d", "--no-build", "--scale", f"actor={ACTORS}")
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "20", ok=(0, 1))


@pytest.mark.slow
def test_a_run_with_three_actors_learns(project: Project) -> None:
    project.wait_for("100 updates", lambda: project.updates() > 100)

    def granted() -> list[list[int]]:
        return [peer["slots"] for peer in project.status().get("peers", []) if peer["role"] == "actor"]

    project.wait_for("three actors in the run", lambda: len(granted()) == ACTORS)
    slots = [slot for some in granted() for slot in some]
    assert len(set(slots)) == len(slots) == ACTORS * 16
    shards = {
        peer["name"]: peer["endpoint"] for peer in project.status()["peers"] if peer["role"] == "replay"
    }
    assert sorted(shards) == ["replay-0", "replay-1"]
    assert len(set(shards.values())) == SHARDS
    for service in SERVICES:
        project.wait_for(
            f"{service} is well", lambda service=service: all(map(well, project.inspect(service)))
        )
    for container in project.inspect("keys"):
        assert (container["State"]["Running"], container["State"]["ExitCode"]) == (False, 0)


@pytest.mark.slow
def test_the_learner_reads_the_items_where_they_lie(project: Project) -> None:
    project.wait_for("200 updates", lambda: project.updates() > 200)
    logs = project.compose("logs", "--no-color", "learner")
    for number in range(SHARDS):
        assert f"reading replay's files in /var/lib/troupe/replay/cartpole-apex/replay/shard-{number}" in logs


@pytest.mark.slow
def test_a_container_holds_no_more_than_its_own_keys_and_may_write_nowhere(project: Project) -> None:
    actor = project.inspect("actor")[0]["Id"]
    assert project.execute(actor, "ls", "/etc/troupe/keys").split() == [
        "actor.secret",
        "learner.public",
        "replay.public",
    ]
    assert "uid=10001" in project.execute(actor, "id")
    assert "Read-only file system" in project.execute(actor, "sh", "-c", "echo >/opt/troupe/x")


@pytest.mark.slow
def test_every_metric_of_the_dashboard_exists(project: Project) -> None:
    expressions = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]
    ]
    wanted = set(re.findall(r"\b(?:troupe|process)_\w+", " ".join(expressions)))
    assert len(wanted) > 15
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9100/metrics').read().decode())"

    def there() -> set[str]:
        # As Prometheus would: by the name of the service, over the run's network.
        text = ""
        for service in ("learner", "replay", "actor", "evaluator"):
            container = project.inspect(service)[0]["Id"]
            text += project.execute(container, "/opt/troupe/venv/bin/python", "-c", ask)
        return wanted & set(re.findall(r"^(\w+)", text, re.MULTILINE))

    project.wait_for(f"metrics {wanted}", lambda: there() == wanted)


@pytest.mark.slow
def test_tensorboard_shows_scalars_in_a_browser(project: Project, deploy_python: str, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{project.env['TROUPE_TENSORBOARD_PORT']}/"
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.status == 200
    if (
        not os.environ.get("CHROMIUM")
        and not shutil.which("chromium")
        and not shutil.which("chromium-browser")
    ):
        pytest.skip("NOT TESTED: chromium is not installed")
    picture = Path(os.environ.get("TROUPE_TEST_PICTURE", tmp_path / "tensorboard.png"))
    script = Path(__file__).with_name("look.py")
    output = run(deploy_python, script, url, "speed/updates_per_s", picture, cwd=ROOT, env=dict(os.environ))
    seen = json.loads(output.strip().split("\n")[-1])
    assert seen["title"] == "TensorBoard"
    assert "speed/updates_per_s" in seen["card"]
    assert seen["points"] >= 2
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_the_board_shows_the_run_and_keeps_its_note(project: Project) -> None:
    url = f"http://127.0.0.1:{project.env['TROUPE_BOARD_PORT']}/"
    with urllib.request.urlopen(f"{url}api/runs", timeout=60) as answer:
        [run_shown] = json.load(answer)["runs"]
    assert run_shown["name"] == "cartpole-apex"
    note = urllib.request.Request(
        f"{url}api/runs/{run_shown['id']}/note",
        data=json.dumps({"text": "in a container"}).encode(),
        headers={"Content-Type": "application/json"},
        method="PUT",
    )
    with urllib.request.urlopen(note, timeout=60) as answer:
        assert json.load(answer) == {"note": "in a container"}
    elsewhere = urllib.request.Request(url, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(elsewhere, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_container_comes_back_and_the_run_goes_on(project: Project, service: str) -> None:
    """`docker kill` would count as a wish: the processes are killed from outside."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: killing processes of containers needs root")
    for number in range(len(project.inspect(service))):
        before = project.inspect(service)[number]
        pid, restarts = before["State"]["Pid"], before["RestartCount"]
        if not Path(f"/proc/{pid}").exists():
            pytest.skip("NOT TESTED: the Docker daemon is on another machine")
        updates = project.updates()
        os.kill(pid, signal.SIGKILL)

        def healed(number: int = number, restarts: int = restarts) -> bool:
            now = project.inspect(service)[number]
            return now["RestartCount"] > restarts and well(now)

        project.wait_for(f"{service} {number} is back", healed)
        # A learner may have lost what came after its last checkpoint.
        if service == "learner":
            updates = project.updates()
        project.wait_for("the run goes on", lambda updates=updates: project.updates() > updates + 20)


@pytest.mark.slow
def test_a_run_that_is_taken_down_resumes(project: Project) -> None:
    steps = int(project.status()["steps"])
    project.compose("stop", timeout_s=300)
    for service in ("learner", "replay", "actor"):  # those that have something to save
        for container in project.inspect(service):
            assert container["State"]["ExitCode"] == 0, f"{service} did not stop cleanly"
    project.compose("down", timeout_s=300)
    project.compose("up", "-d", "--no-build", "--scale", f"actor={ACTORS}")
    # The old learner's last status may exceed the steps read above; only the log tells of the new one.
    project.wait_for(
        "the run resumes", lambda: "resumed from" in project.compose("logs", "--no-color", "learner")
    )
    restored = re.compile(r"restored \d+ items")
    project.wait_for("items return", lambda: restored.search(project.compose("logs", "--no-color", "replay")))
    logs = project.compose("logs", "--no-color", "learner")
    found = re.search(r"resumed from \S+: (\d+) steps", logs)
    assert found is not None, logs
    assert int(found.group(1)) >= steps
    updates = project.updates()
    project.wait_for("learning goes on", lambda: project.updates() > updates + 20)


@pytest.mark.slow
def test_a_complete_run_ends_and_stays_so(project: Project) -> None:
    """A tunable field may change between two starts; whoever is done is not started again."""
    project.env["TROUPE_RUN__TOTAL_STEPS"] = str(int(project.status()["steps"]) + 2000)
    project.compose("up", "-d", "--no-build", "--scale", f"actor={ACTORS}")

    project.wait_for("all are done", lambda: _done(project))
    assert "resuming with run.total_steps" in project.compose("logs", "--no-color", "learner")
    project.compose("up", "-d", "--no-build", "--scale", f"actor={ACTORS}")
    project.wait_for("all have heard that the run is complete", lambda: _done(project))
    assert "the run is complete at" in project.compose("logs", "--no-color", "learner")


def _done(project: Project) -> bool:
    """Whether the learner and all members have ended, and well."""
    names = ("learner", "replay", "actor", "evaluator")
    ended = [one["State"] for name in names for one in project.inspect(name)]
    return all(not state["Running"] and state["ExitCode"] == 0 for state in ended)


@pytest.mark.slow
def test_a_mistake_is_said_once_and_waits_to_be_put_right(project: Project) -> None:
    project.env["TROUPE_ENV__ID"] = "gym:Acrobot-v1"  # structural: the run was begun with another
    try:
        project.compose("up", "-d", "--no-build", "--no-deps", "learner")
        held = "learner ended with status 2, which no restart would mend"
        project.wait_for("it waits", lambda: held in project.compose("logs", "--no-color", "learner"))
        learner = project.inspect("learner")[0]
        assert (learner["State"]["Running"], learner["RestartCount"]) == (True, 0)
        project.compose("stop", "learner")
        assert project.inspect("learner")[0]["State"]["ExitCode"] == 2
    finally:
        del project.env["TROUPE_ENV__ID"]


@pytest.mark.slow
def test_a_run_of_one_shard_may_be_scaled_to_two(images: dict[str, Any]) -> None:
    env = {
        "TROUPE_IMAGES": images["replay"]["prefix"],
        "TROUPE_PRESET": "cartpole-apex",
        "TROUPE_RUN__LOG_EVERY_S": "2",
        "TROUPE_REPLAY__MIN_ITEMS": "500",
    }
    project = Project(f"troupe-test-scale-{os.getpid()}", env)
    ask = ("troupe", "replay", "status", "tcp://localhost:5560", "--keys", "/etc/troupe/keys")

    def sampled() -> list[int]:
        texts = [project.execute(one["Id"], *ask) for one in project.inspect("replay")]
        found = [re.search(r"^sampled +([\d,]+)", text, re.MULTILINE) for text in texts]
        return [int(one[1].replace(",", "")) if one else 0 for one in found]

    try:
        services = ("keys", "learner", "replay", "actor")
        project.compose("up", "-d", "--no-build", "--scale", f"replay={SHARDS}", *services)
        project.wait_for("batches of both shards", lambda: len(sampled()) == SHARDS and all(sampled()))
        project.wait_for("updates", lambda: project.updates() > 20)
        assert {one["RestartCount"] for name in services for one in project.inspect(name)} == {0}
    finally:
        project.compose("down", "--volumes", "--timeout", "20", ok=(0, 1))


@pytest.mark.slow
def test_the_profile_gpu_puts_another_learner_in_place(images: dict[str, Any], tmp_path: Path) -> None:
    """Without a GPU: what asks for the device is taken out, everything else is as it is."""
    override = tmp_path / "no-gpu.yml"
    override.write_text(
        "services:\n  learner-gpu:\n    image: ${TROUPE_IMAGES}-learner:latest\n"
        "    deploy: {resources: {reservations: !reset null}}\n"
    )
    env = {
        "TROUPE_IMAGES": images["replay"]["prefix"],
        "TROUPE_PRESET": "cartpole-apex",
        "TROUPE_LEARNER__DEVICE": "cpu",
        "TROUPE_REPLAY__MIN_ITEMS": "500",
    }
    project = Project(f"troupe-test-gpu-{os.getpid()}", env)
    words = ["-f", str(ROOT / "docker-compose.yml"), "-f", str(override), "--profile", "gpu"]
    try:
        project.compose(*words, "up", "-d", "--no-build", "keys", "learner", "learner-gpu", "replay", "actor")
        project.wait_for(
            "the other learner ends", lambda: not project.inspect("learner")[0]["State"]["Running"]
        )
        assert project.inspect("learner")[0]["State"]["ExitCode"] == 0

        def updates() -> int:
            gpu = project.inspect("learner-gpu")[0]["Id"]
            text = project.execute(gpu, "sh", "-c", 'cat "$TROUPE_RUN_DIR/status.json"')
            with contextlib.suppress(ValueError):
                return int(json.loads(text).get("updates", 0))
            return 0

        project.wait_for("updates", lambda: updates() > 20)
    finally:
        project.compose(*words, "down", "--volumes", "--timeout", "20", ok=(0, 1))
