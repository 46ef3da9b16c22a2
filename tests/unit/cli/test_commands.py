"""Commands against a real server in this process: text, JSON, exit codes, sentences."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from p2prl.cli.main import COMMANDS, SUMMARIES, group
from p2prl.identity import Identity
from p2prl.status import HealthItem
from tests.unit.web.nodes import HOSTILE, PEER, Served, served_in_thread, status

HEAVY = ("torch", "hivemind", "transformers", "pydantic", "numpy", "starlette", "uvicorn")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def node(home: Path) -> Iterator[Served]:
    with served_in_thread(home) as each:
        yield each


def p2prl(home: Path, *args: str, **env: str) -> Result:
    return CliRunner(env={"P2PRL_HOME": "", "NO_COLOR": "1", **env}).invoke(group, ["--home", str(home), *args])


def test_status_is_one_screen(home: Path, node: Served) -> None:
    result = p2prl(home, "status")
    assert result.exit_code == 0, result.output
    for words in (
        "quiet-otter",
        "working",
        "1.41.cafecafe (1 behind)",
        "3 peers (1 relayed)",
        "4 stale",
        "! clock is 2.4 s ahead",
    ):
        assert words in result.output


def test_status_json_is_the_reply_and_check_tells_health(home: Path, node: Served) -> None:
    result = p2prl(home, "status", "--json", "--check")
    assert json.loads(result.stdout)["schema"] == 1 and len(result.stdout.splitlines()) == 1
    assert result.exit_code == 4
    node.node.status = status(health=())
    assert p2prl(home, "status", "--check").exit_code == 0
    assert json.loads(p2prl(home, "--json", "status").stdout)["node"]["peer_id"] == PEER


def test_status_watch_shows_each_change_until_the_daemon_ends(home: Path, node: Served) -> None:
    def change() -> None:
        while not node.ring._readers:  # the watcher is there
            threading.Event().wait(0.01)
        node.ring.publish("status", status(health=(HealthItem(message="second screen"),)))
        node.ring.close()

    other = threading.Thread(target=change)
    other.start()
    result = p2prl(home, "status", "--watch")
    other.join()
    assert result.exit_code == 0
    assert "clock is 2.4 s ahead" in result.output and "second screen" in result.output


def test_peers_names_reach_the_terminal_without_control_characters(home: Path, node: Served) -> None:
    result = p2prl(home, "peers")
    assert result.exit_code == 0 and "\x1b" not in result.output
    assert "<img src=x onerror=alert(1)>\\x1b[31m" in result.output
    assert json.loads(p2prl(home, "peers", "--json").stdout)[0]["name"] == HOSTILE
    assert p2prl(home, "peers", "--sort", "contribution").output.splitlines()[1].split()[1] == "amber-fox"
    assert len(p2prl(home, "peers", "amber").output.splitlines()) == 2
    assert p2prl(home, "peers", "nobody").exit_code == 1


def test_logs_show_and_filter(home: Path, node: Served) -> None:
    result = p2prl(home, "logs", "--component", "rollout")
    assert result.output.split() == ["14:13:20.000", "info", "rollout", "group", "done", "reward=0.62"]
    lines = p2prl(home, "logs", "--json").stdout.splitlines()
    assert [json.loads(line)["component"] for line in lines] == ["rollout", "receive"]
    assert p2prl(home, "logs", "--since", "10 parsecs").exit_code == 2


def test_doctor_shows_the_daemons_report(home: Path, node: Served) -> None:
    result = p2prl(home, "doctor")
    assert result.exit_code == 0 and "ok    disk: 212 GB free" in result.output
    assert p2prl(home, "doctor", "--check").exit_code == 4


def test_doctor_without_a_daemon_checks_this_machine(home: Path, tmp_path: Path) -> None:
    (home / "config").mkdir(parents=True)
    (home / "config/config.toml").write_text("[swarm]\nport = 0\n[web]\nport = 0\n")
    result = p2prl(home, "doctor", "--json")
    checks = {check["name"]: check["level"] for check in json.loads(result.stdout)["checks"]}
    assert {"python", "packages", "disk", "home", "identity", "config", "swarm.port", "web.port"} <= set(checks)
    assert (checks["config"], result.exit_code) == ("ok", 0)
    (home / "config/config.toml").write_text("[swarm]\nprot = 1\n")
    result = p2prl(home, "doctor")
    assert result.exit_code == 6 and "prot" in result.output


def test_web_prints_a_login_address_that_works(home: Path, node: Served) -> None:
    url = p2prl(home, "web", "--print-url").output.strip()
    assert url.startswith(f"{node.url}/login#") and len(url) > len(node.url) + 30


def test_invite_carries_swarm_and_address(home: Path, node: Served) -> None:
    assert p2prl(home, "invite").output.strip() == f"p2prl://{'7c1e' * 16}?peer=/ip4/127.0.0.1/tcp/7001/p2p/{PEER}"
    node.node.status = status(swarm=type(node.node.status.swarm)())
    assert p2prl(home, "invite").exit_code == 1


def test_stop_waits_until_the_process_is_gone(home: Path, node: Served) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    file = home / "state/node.json"
    file.write_text(json.dumps({"pid": daemon.pid, "url": node.url}))
    node.node.on_stop = daemon.terminate
    result = p2prl(home, "stop", "--timeout", "5", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["pid"] == daemon.pid
    assert node.node.stopped == [5.0]
    daemon.communicate()


@pytest.mark.parametrize("command", ["status", "peers", "logs", "stop", "web", "invite"])
def test_no_daemon_is_said_with_the_way_out(home: Path, command: str) -> None:
    result = p2prl(home, command)
    assert result.exit_code == 3
    assert (
        result.stderr
        == f"error: no p2prl daemon is running for {home}/state. Start one with: p2prl --home {home} run\n"
    )


def test_the_log_of_a_daemon_that_is_gone_is_named(home: Path) -> None:
    file = home / "state/logs/p2prl.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("{}\n")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for left in ("", json.dumps({"pid": gone.pid, "url": "http://127.0.0.1:1"})):  # it stopped; it crashed
        (home / "state/node.json").write_text(left)
        result = p2prl(home, "logs")
        assert result.exit_code == 3
        assert result.stderr.endswith(f"p2prl --home {home} run. What the last one logged: {file}\n")


def test_a_daemon_that_hangs_has_its_log_named(home: Path, node: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        (home / "state/node.json").write_text(json.dumps({"pid": os.getpid(), "url": url}))
        monkeypatch.setattr("p2prl.cli.client.TIMEOUT_S", 0.1)
        result = p2prl(home, "status")
    assert result.exit_code == 1 and f"does not answer within 0 s. See {home}/state/logs/p2prl.jsonl" in result.stderr


def test_a_stale_node_file_and_a_closed_port_are_no_daemon(home: Path) -> None:
    with served_in_thread(home):
        pass
    assert p2prl(home, "status").exit_code == 3
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (home / "state/node.json").write_text(json.dumps({"pid": gone.pid, "url": "http://127.0.0.1:1"}))
    assert p2prl(home, "status").exit_code == 3
    (home / "state/node.json").write_text("{")
    assert p2prl(home, "status").exit_code == 3


def test_a_wrong_token_is_refused_and_no_proxy_gets_it(home: Path, node: Served) -> None:
    assert p2prl(home, "status", http_proxy="http://127.0.0.1:1").exit_code == 0
    (home / "state/api.token").write_text("w" * 43)
    result = p2prl(home, "status")
    assert result.exit_code == 5 and "the token is wrong" in result.stderr


def test_the_token_is_never_sent_to_another_machine(home: Path, node: Served) -> None:
    (home / "state/node.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://192.0.2.1:80"}))
    assert p2prl(home, "status").exit_code == 3


def test_id_config_paths_version(home: Path) -> None:
    assert p2prl(home, "id").exit_code == 2
    (home / "state").mkdir(parents=True)
    identity = Identity.create(home / "state/identity.key")
    assert p2prl(home, "id").output.split() == [identity.peer_id, identity.name]
    shown = p2prl(home, "config", "show", "--origin", P2PRL_WEB__PORT="8421").output
    assert ["web.port", "8421", "P2PRL_WEB__PORT"] in [line.split() for line in shown.splitlines()]
    values = {each["key"]: each for each in json.loads(p2prl(home, "config", "show", "--json").stdout)}
    assert values["swarm.port"] == {"key": "swarm.port", "value": 24420, "origin": "default"}
    assert str(home) in p2prl(home, "paths").output
    assert json.loads(p2prl(home, "version", "--json").stdout)["python"].startswith("3.")


def test_usage_errors_and_interrupts_have_their_codes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert p2prl(home, "nothing").exit_code == 2
    assert p2prl(home, "status", "--nothing").exit_code == 2

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("p2prl.cli.status.daemon_of", interrupted)
    assert p2prl(home, "status").exit_code == 130


def test_help_shows_what_is_built_and_only_that(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(COMMANDS) == set(SUMMARIES)
    monkeypatch.setitem(COMMANDS, "init", "p2prl.cli.not_built:init")
    shown = p2prl(home, "--help").output
    assert "  status " in shown and "  init " not in shown
    assert p2prl(home, "init").exit_code == 2


def test_reading_commands_load_nothing_heavy(home: Path) -> None:
    code = "import sys; from p2prl.cli import main, status, peers, logs, stop, web, invite, places, doctor; "
    code += f"print([name for name in {HEAVY} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_file_of_another_user_is_told_of_in_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path.state / "lock"))  # pyright: ignore

    monkeypatch.setattr("p2prl.node.disk.check_room", refuse)
    result = p2prl(home, "run", "addition")
    assert result.exit_code == 5
    assert "lock: Permission denied" in result.output and "another user's" in result.output
    assert "Traceback" not in result.output
